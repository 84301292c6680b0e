"""Tests on real ranks that every algorithm computes the sum of the ring for many shapes."""

import pytest

from tests import ranks
from tests.comm import programs


def check(outcomes):
    size = len(outcomes)
    names = outcomes[0]["algorithms"]
    assert {"ring", "exchange", f"torus 1x{size}", f"masters {size}x1"} <= set(names)
    assert [out["wrong"] for out in outcomes] == [[]] * size


def test_algorithms_on_four_ranks_compute_exact_sums(pools):
    check(pools[4].call(programs.all_algorithms))


@pytest.mark.slow
def test_algorithms_with_the_tensorflow_engine_compute_exact_sums(pools):
    check(pools["tensorflow"].call(programs.all_algorithms, "tensorflow"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_algorithms_on_other_numbers_of_ranks_compute_exact_sums(size):
    with ranks.own(size) as pool:
        check(pool.call(programs.all_algorithms))


@pytest.mark.slow
def test_algorithms_on_eleven_ranks_with_the_tensorflow_engine_compute_exact_sums():
    with ranks.own(11) as pool:
        check(pool.call(programs.all_algorithms, "tensorflow"))
