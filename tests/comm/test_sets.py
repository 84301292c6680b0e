"""Horovod's process sets, which it must know at its start."""

import pytest

from tests import ranks
from tests.comm import programs


def outcome(pool, name, others=(), hosts=None):
    return alike(pool.call(programs.process_sets, {"allreduce": name}, others, hosts))


def alike(outcomes):
    mean = (len(outcomes) + 1) / 2
    for out in outcomes:
        assert out["sum"] == [[mean, 2 * mean, 3 * mean]]
        assert out == outcomes[0]
    return outcomes[0]


def test_the_ring_has_no_sets(pools):
    out = outcome(pools[2], "ring")
    assert (out["sets"], out["algorithm"]) == ([], "ring")


GRID = [[0, 1], [0, 2], [1, 3], [2, 3]]


def test_all_algorithms_share_the_sets_of_a_grid(pools):
    out = outcome(pools[4], "torus", others=("masters", "size_switched"))
    assert out["sets"] == GRID
    assert out["algorithm"] == "torus"


def test_rows_of_the_grid_are_hosts_if_ranks_are_dealt_out_over_hosts(pools):
    out = outcome(pools[4], "hierarchical", hosts=("a", "b", "a", "b"), others=("torus",))
    assert out["sets"] == GRID
    assert out["hosts"] == ["a", "b", "a", "b"]
    assert out["algorithm"] == "hierarchical"


def test_rank_0_sets_the_size_of_neighbor_groups(pools):
    """Only rank 0 may know the run that is resumed, and with it the batch normalization groups."""
    assert pools[4].call(programs.neighbors, [2, 1, 4, 1]) == [2.0] * 4


@pytest.mark.slow
def test_three_ranks_on_two_hosts_need_no_sets():
    with ranks.own(3) as pool:
        out = outcome(pool, "torus", hosts=("a", "b", "b"))
    assert (out["sets"], out["algorithm"]) == ([], "torus")
