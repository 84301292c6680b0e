"""Tests Horovod's process sets, which it needs when it starts."""

import pytest

from tests import ranks
from tests.comm import programs


def outcome(pool, name, others=(), hosts=None):
    return common_outcome(pool.call(programs.process_sets, {"allreduce": name}, others, hosts))


def common_outcome(outcomes):
    """Returns the outcome of rank 0; fails if a sum is wrong or the ranks differ."""
    mean = (len(outcomes) + 1) / 2
    for out in outcomes:
        assert out["sum"] == [[mean, 2 * mean, 3 * mean]]
        assert out == outcomes[0]
    return outcomes[0]


def test_process_sets_of_the_ring_are_empty(pools):
    out = outcome(pools[2], "ring")
    assert (out["sets"], out["algorithm"]) == ([], "ring")


GRID = [[0, 1], [0, 2], [1, 3], [2, 3]]


def test_process_sets_of_a_grid_are_shared_by_all_algorithms(pools):
    out = outcome(pools[4], "torus", others=("masters", "size_switched"))
    assert out["sets"] == GRID
    assert out["algorithm"] == "torus"


def test_process_sets_of_ranks_that_alternate_between_hosts_have_hosts_as_rows(pools):
    out = outcome(pools[4], "hierarchical", hosts=("a", "b", "a", "b"), others=("torus",))
    assert out["sets"] == GRID
    assert out["hosts"] == ["a", "b", "a", "b"]
    assert out["algorithm"] == "hierarchical"


def test_neighbor_groups_have_the_size_that_rank_0_sets(pools):
    # Only rank 0 may see the run that is resumed, and its groups of batch normalization.
    assert pools[4].call(programs.neighbors, [2, 1, 4, 1]) == [2.0] * 4


@pytest.mark.slow
def test_process_sets_of_three_ranks_on_two_hosts_are_empty():
    with ranks.own(3) as pool:
        out = outcome(pool, "torus", hosts=("a", "b", "b"))
    assert (out["sets"], out["algorithm"]) == ([], "torus")
