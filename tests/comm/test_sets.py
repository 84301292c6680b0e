"""Sets of ranks are known to Horovod from its start, whatever the launcher, the algorithm and the hosts."""

import pytest

from tests.ranks import results

# HOSTS names the host of each rank, if they are to seem several; OTHERS are algorithms of further reductions.
CODE = """
import importlib.util
from hybrid_imagenet import comm
from hybrid_imagenet.comm import Settings, hosts
place = comm.placement()
if HOSTS:
    hosts.key = lambda: [HOSTS[place.rank], ""]
if not MPI4PY:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None if name == "mpi4py" else find(name)
c = comm.start(Settings(allreduce=NAME, compression="none"), others=[
    Settings(allreduce=name) for name in OTHERS
])
import horovod.tensorflow as hvd
import tensorflow as tf
out = {"hosts": list(c.hosts), "sets": sorted(sorted(s.ranks) for s in c.sets.made())}
out["sum"] = [g.numpy().tolist() for g in c.reduce_gradients([tf.range(1.0, 4.0) * (c.rank + 1)], ["a"])]
out["algorithm"] = c.statistics()["buckets"][0]["algorithm"]
try:
    hvd.add_process_set([0])
    out["open"] = True
except ValueError:
    out["open"] = False
c.barrier()  # a set is made only while all ranks run
c.shutdown()
report(out)
"""


def outcome(ranks, name, others=(), hosts=(), gloo=False, mpi4py=True):
    head = f"NAME, OTHERS, HOSTS, MPI4PY = {name!r}, {others!r}, {hosts!r}, {mpi4py!r}\n"
    outcomes = results(ranks, head + CODE, gloo=gloo)
    mean = (ranks + 1) / 2
    for out in outcomes:
        assert out["sum"] == [[mean, 2 * mean, 3 * mean]]
        assert out == outcomes[0]
    return outcomes[0]


def test_the_ring_has_no_sets():
    out = outcome(2, "ring")
    assert (out["sets"], out["open"], out["algorithm"]) == ([], False, "ring")


@pytest.mark.parametrize("gloo", [False, True])
def test_all_algorithms_share_the_sets_of_a_grid(gloo):
    out = outcome(4, "torus", others=("masters", "hybrid", "auto"), gloo=gloo)
    assert out["sets"] == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert (out["open"], out["algorithm"]) == (False, "torus")


def test_ranks_dealt_out_over_hosts_are_neighbors_in_the_grid():
    out = outcome(4, "hierarchical", hosts=("a", "b", "a", "b"), others=("torus",))
    assert out["sets"] == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert out["hosts"] == ["a", "b", "a", "b"]
    assert (out["open"], out["algorithm"]) == (False, "hierarchical")


def test_hosts_with_different_numbers_of_ranks():
    out = outcome(3, "torus", hosts=("a", "b", "b"))
    assert (out["sets"], out["open"], out["algorithm"]) == ([], False, "torus")


def test_without_a_way_to_ask_early_sets_are_added_later():
    out = outcome(4, "torus", mpi4py=False)
    assert out["sets"] == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert (out["open"], out["algorithm"]) == (True, "torus")
