import pytest

from studies.search import halving


@pytest.mark.parametrize(
    ("candidates", "budget", "expected"),
    [
        (2, 2, [(2, 1)]),
        (2, 9, [(2, 4)]),
        (3, 7, [(3, 1), (2, 2)]),
        (8, 32, [(8, 1), (4, 2), (2, 4)]),
        (15, 100, [(15, 1), (8, 2), (4, 4), (2, 8)]),
        (15, 126, [(15, 2), (8, 4), (4, 8), (2, 16)]),
    ],
)
def test_rounds_written_out(candidates, budget, expected):
    found = halving.rungs(candidates, budget)
    assert [(rung.candidates, rung.epochs) for rung in found] == expected
    assert sum(rung.candidates * rung.epochs for rung in found) <= budget


def test_too_little_is_named():
    with pytest.raises(ValueError, match=r"need 63 epochs .* 62 are too few"):
        halving.rungs(15, 62)
    with pytest.raises(ValueError, match="at least two"):
        halving.rungs(1, 10)
