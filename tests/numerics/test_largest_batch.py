import pytest

from hybrid_imagenet.numerics import largest_batch


def run(peak, limit, most=4096):
    tried = []

    def measure(batch):
        tried.append(batch)
        return peak(batch)

    batch, peaks = largest_batch.search(measure, limit, most)
    assert list(peaks) == tried and len(set(tried)) == len(tried)
    return batch, tried


@pytest.mark.parametrize("limit", [5.0e9, 7.3e9, 16e9, 31e9])
def test_memory_that_is_a_line_is_met_in_few_trials(limit):
    """0.6 GB and 55 MB per image, as a network has it."""
    batch, tried = run(lambda b: 0.6e9 + 55e6 * b, limit)
    expected = int((limit - 0.6e9) // 55e6) // 8 * 8
    assert batch == expected
    assert batch + 8 in tried
    assert len(tried) <= 7


@pytest.mark.parametrize("largest", [*range(8), 8, 9, 15, 16, 100, 255, 256, 1000])
def test_failures_alone_lead_to_the_same_batch(largest):
    batch, tried = run(lambda b: 1.0 if b <= largest else None, float("inf"), most=512)
    expected = min(largest, 512)
    assert batch == (expected if largest < 8 else expected // 8 * 8)
    assert len(tried) <= 14


def test_memory_in_stairs_is_narrowed_down():
    def peak(b):
        return 1e9 + 40e6 * (-(-b // 48) * 48)

    batch, tried = run(peak, 9e9)
    assert peak(batch) <= 9e9 < peak(batch + 8)
    assert len(tried) <= 14


def test_no_more_than_the_data_set_allows():
    assert run(lambda b: 1.0, 2.0, most=100)[0] == 96
    assert run(lambda b: 1.0, 2.0, most=5)[0] == 5
    assert run(lambda b: 1.0, 2.0, most=1)[0] == 1
    assert run(lambda b: 3.0, 2.0, most=1)[0] == 0
