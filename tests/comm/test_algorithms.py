"""Every algorithm gives the ring's sum: real ranks, many shapes in each start."""

import pytest

from tests import ranks
from tests.comm import programs


def check(outcomes):
    size = len(outcomes)
    names = outcomes[0]["algorithms"]
    assert {"ring", "exchange", f"torus 1x{size}", f"masters {size}x1"} <= set(names)
    assert [out["wrong"] for out in outcomes] == [[]] * size


def test_all_algorithms_sum_like_the_ring(pools):
    check(pools[4].call(programs.all_algorithms))


def test_all_algorithms_sum_like_the_ring_with_tensorflow(pools):
    check(pools["tensorflow"].call(programs.all_algorithms, "tensorflow"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_all_algorithms_on_other_numbers_of_ranks(size):
    with ranks.own(size) as pool:
        check(pool.call(programs.all_algorithms))


@pytest.mark.slow
def test_tensorflow_keeps_the_order_of_more_than_ten_ranks():
    with ranks.own(11) as pool:
        check(pool.call(programs.all_algorithms, "tensorflow"))
