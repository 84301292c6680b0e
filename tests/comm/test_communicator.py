"""Collectives between real ranks."""

import math

import pytest

from tests.ranks import results, run

ALL = """
import numpy as np
import sys
from hybrid_imagenet import comm
c = comm.start()
import tensorflow as tf
out = {"rank": c.rank, "size": c.size, "local": [c.local_rank, c.local_size], "hosts": list(c.hosts)}
out["horovod"] = "horovod" in sys.modules
out["threads"] = tf.config.threading.get_intra_op_parallelism_threads()
out["sum"] = c.allreduce_sum(tf.constant([1.0, 2.0]) * (c.rank + 1), "s").numpy().tolist()

@tf.function
def in_graph(x):
    return c.allreduce_sum(x, "t")
out["graph_sum"] = int(in_graph(tf.constant(c.rank)))

variables = [
    tf.Variable(tf.cast(tf.fill([3, 2], c.rank + 5), dtype))
    for dtype in ("float32", "float16", "bfloat16", "uint32", "int64", "bool")
] + [tf.Variable(float(c.rank)), tf.Variable(tf.zeros([0, 4]))]
c.broadcast_variables(variables, root=c.size - 1)
out["variables"] = [np.asarray(v.numpy(), np.float64).ravel().tolist() for v in variables]
out["object"] = c.broadcast_object({"from": c.rank, "list": [1, None, "ä"]}, root=c.size - 1)
out["gathered"] = c.allgather_object("x" * c.rank)
c.barrier()

@tf.function
def reduce(x):
    return c.reduce_gradients([x * 2.0, tf.cast(x[0], tf.bfloat16), tf.cast(x, tf.float16)], ["a", "b", "c"])
grads = reduce(tf.constant([1.0, 2.0, 3.0]) * (c.rank + 1))
out["grads"] = [[g.dtype.name, g.numpy().tolist()] for g in grads]
out["eager"] = [g.numpy().tolist() for g in c.reduce_gradients([tf.constant([1.0]) * c.rank], ["d"])]
@tf.function
def packed(x):
    buckets, members = c.reduce_packed([x * 2.0, tf.cast(x[0], tf.bfloat16), tf.zeros([0]), x], ["a", "b", "e", "c"])
    packed.members = [list(m) for m in members]
    return buckets
vectors = packed(tf.constant([1.0, 2.0, 3.0]) * (c.rank + 1))
out["packed"] = {}
for vector, members in zip(vectors, packed.members):
    rows = vector.numpy().astype(np.float64).reshape(len(members), -1)
    out["packed"] |= {str(m): [row[:3].tolist(), len(row), float(row[3:].sum())] for m, row in zip(members, rows)}
c.shutdown()
report(out)
"""


@pytest.mark.parametrize(("ranks", "gloo"), [(0, False), (1, False), (2, False), (4, False), (2, True)])
def test_collectives(ranks, gloo):
    """Without a launcher (0), with 1, 2 and 4 ranks of MPI, and with Gloo."""
    size = max(ranks, 1)
    for rank, out in enumerate(results(ranks, ALL, gloo=gloo)):
        assert (out["rank"], out["size"], out["local"]) == (rank, size, [rank, size])
        assert len(out["hosts"]) == size and len(set(out["hosts"])) == 1
        assert out["horovod"] == (size > 1)
        total = size * (size + 1) / 2
        assert out["sum"] == [total, 2 * total]
        assert out["graph_sum"] == size * (size - 1) / 2
        assert out["variables"] == [[size + 4] * 6] * 5 + [[1.0] * 6, [size - 1], []]
        assert out["object"] == {"from": size - 1, "list": [1, None, "ä"]}
        assert out["gathered"] == ["x" * r for r in range(size)]
        mean = total / size
        whole = [mean, 2 * mean, 3 * mean]  # each gradient fills a row; the one without elements travels nowhere
        rows = {"0": [2 * x for x in whole], "1": [mean, 0.0, 0.0], "3": whole}
        assert out["packed"] == {place: [values, 1024, 0.0] for place, values in rows.items()}
        assert [name for name, _ in out["grads"]] == ["float32"] * 3
        assert out["grads"][0][1] == [2 * mean, 4 * mean, 6 * mean]
        assert math.isclose(out["grads"][1][1], mean)
        assert out["grads"][2][1] == [mean, 2 * mean, 3 * mean]
        assert out["eager"] == [[(size - 1) / 2]]


ERRORS = """
from hybrid_imagenet import comm
c = comm.start()
import tensorflow as tf
def message(call, *arguments):
    try:
        call(*arguments)
    except comm.UserError as error:
        return str(error)
c.agree(None)
report([
    message(c.agree, {1: "cannot read", 2: "no space"}.get(c.rank)),
    message(c.agree, "--x=1: too small" if c.rank == 0 else None),
    message(c.broadcast_variables, [tf.Variable(tf.zeros([2 + c.rank]))]),
    message(c.reduce_gradients, [tf.zeros([2])], [f"layer_{c.rank}"]),
])
"""


def test_errors_of_some_ranks_end_all():
    outcomes = results(3, ERRORS)
    assert all(out == outcomes[0] for out in outcomes)
    reading, small, variables, gradients = outcomes[0]
    assert reading.startswith("rank 1 on ") and reading.endswith(": cannot read")
    assert small == "--x=1: too small"
    assert variables.startswith("rank 1 on ") and "the 1 variables to broadcast differ" in variables
    assert gradients.startswith("rank 1 on ") and "gradients differ" in gradients


def test_a_rank_that_dies_does_not_leave_the_others_hanging():
    code = """
from hybrid_imagenet import comm
c = comm.start()
if c.rank == 1:
    raise SystemExit(3)
c.allgather_object("waiting")
"""
    done = run(2, code)
    assert done.returncode != 0
