"""Programs that the tests of communication run on each rank."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import typing
from collections.abc import Callable
from unittest import mock

import numpy as np

from hybrid_imagenet import comm
from hybrid_imagenet.comm import CommunicationSettings, hosts, process, torus
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.errors import UserError
from tests.support.gradients import means

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.connected import ConnectedRanks


def message(call, *arguments) -> str | None:
    """The error that a call raises."""
    try:
        call(*arguments)
    except (UserError, ValueError) as error:
        return str(error)
    return None


def collectives(engine: str = "horovod") -> dict:
    """One of each collective operation, inside of what AutoGraph converts on two ranks: a user's
    own function is.

    The program's functions are not; it takes seconds on each rank.
    """
    c = comm.start(CommunicationSettings(engine=engine))
    import tensorflow as tf

    function = functools.partial(tf.function, autograph=c.size == 2)
    out = {
        "rank": c.rank,
        "size": c.size,
        "local": [c.local_rank, c.local_size],
        "hosts": list(c.hosts),
    }
    out["horovod"] = "horovod" in sys.modules
    out["sum"] = c.allreduce_sum(tf.constant([1.0, 2.0]) * (c.rank + 1), "s").numpy().tolist()
    out["host_sum"] = c.allreduce_on_host(tf.constant([1, c.rank]), "h").numpy().tolist()
    out["graph_sum"] = int(function(lambda x: c.allreduce_sum(x, "t"))(tf.constant(c.rank)))
    variables = [
        tf.Variable(tf.cast(tf.fill([3, 2], c.rank + 5), dtype))
        for dtype in ("float32", "float16", "bfloat16", "uint32", "int64", "bool")
    ] + [tf.Variable(float(c.rank)), tf.Variable(tf.zeros([0, 4]))]
    c.broadcast_variables(variables)
    out["variables"] = [np.asarray(v.numpy(), np.float64).ravel().tolist() for v in variables]
    out["object"] = c.broadcast_object({"from": c.rank, "list": [1, None, "ä"]})
    out["gathered"] = c.allgather_object("x" * c.rank)
    c.barrier()

    @function
    def reduce(x):
        grads = [x * 2.0, tf.cast(x[0], tf.bfloat16), tf.cast(x, tf.float16)]
        return means(c.reduce_gradients, grads, ["a", "b", "c"])

    grads = reduce(tf.constant([1.0, 2.0, 3.0]) * (c.rank + 1))
    out["grads"] = [[g.dtype.name, g.numpy().tolist()] for g in grads]
    out["eager"] = [
        g.numpy().tolist() for g in means(c.reduce_gradients, [tf.constant([1.0]) * c.rank], ["d"])
    ]
    out["packed"] = _packed(c, function)
    c.shutdown()
    return out


def _packed(c: Communicator, function: Callable) -> dict:
    """Of each gradient its first three elements, its length and the sum of the rest, by its place
    in the list.
    """
    import tensorflow as tf

    places: list[list[int]] = []

    @function
    def reduce(x):
        grads = [x * 2.0, tf.cast(x[0], tf.bfloat16), tf.zeros([0]), x]
        buckets, members = c.reduce_gradients(grads, ["a", "b", "e", "c"])
        places.extend(list(m) for m in members)
        return buckets

    out = {}
    for vector, members in zip(
        reduce(tf.constant([1.0, 2.0, 3.0]) * (c.rank + 1)), places, strict=True
    ):
        rows = vector.numpy().astype(np.float64).reshape(len(members), -1)
        out |= {
            str(m): [row[:3].tolist(), len(row), float(row[3:].sum())]
            for m, row in zip(members, rows, strict=True)
        }
    return out


def errors(engine: str = "horovod") -> list:
    """What all ranks hear when some of them have met an error."""
    c = comm.start(CommunicationSettings(engine=engine))
    import tensorflow as tf

    c.raise_first_error(None)
    return [
        message(c.raise_first_error, {1: "cannot read", 2: "no space"}.get(c.rank)),
        message(c.raise_first_error, "--x=1: too small" if c.rank == 0 else None),
        message(c.broadcast_variables, [tf.Variable(tf.zeros([2 + c.rank]))]),
        message(c.reduce_gradients, [tf.zeros([2])], [f"layer_{c.rank}"]),
        message(
            process._check_software_versions,
            c,
            None if c.rank == 1 else process.software_versions(),
        ),
        message(
            process._check_software_versions,
            c,
            process.software_versions() | ({"keras": "3.0"} if c.rank else {}),
        ),
    ]


def death(engine: str = "horovod") -> None:
    """One rank leaves while the others wait for it."""
    c = comm.start(CommunicationSettings(engine=engine))
    if c.rank == 1:
        os._exit(3)
    c.allgather_object("waiting")


def refused(settings: dict, hosts_of_ranks: list | None = None) -> str | None:
    """Why communication does not start with these settings."""
    with _as_if_on(hosts_of_ranks):
        return message(comm.start, CommunicationSettings(**settings))


def _as_if_on(hosts_of_ranks: list | None) -> contextlib.AbstractContextManager:
    """Each rank takes itself to be on the named host."""
    if not hosts_of_ranks:
        return contextlib.nullcontext()
    return mock.patch.object(hosts, "host_key", lambda: [hosts_of_ranks[placement().rank], ""])


def sets(settings: dict, others: list, hosts_of_ranks: list | None) -> dict:
    """The sets of ranks that Horovod knows, and a sum through them."""
    with _as_if_on(hosts_of_ranks):
        c = comm.start(
            CommunicationSettings(compression="none", **settings),
            others=[CommunicationSettings(allreduce=name) for name in others],
        )
        import tensorflow as tf

        known = sorted(list(ranks) for ranks in c.collectives._process_sets if len(ranks) < c.size)
        mean = means(c.reduce_gradients, [tf.range(1.0, 4.0) * (c.rank + 1)], ["a"])
        out = {"hosts": list(c.hosts), "sets": known, "sum": [g.numpy().tolist() for g in mean]}
        return out | {"algorithm": c.statistics()["buckets"][0]["algorithm"]}


def neighbors(each: list) -> float:
    """The sum over this rank's neighbors of 1; `each` is what each rank takes for their number."""
    c = comm.start(CommunicationSettings(engine="horovod", neighbors=each[placement().rank]))
    import tensorflow as tf

    return float(c.allreduce_neighbors(tf.constant(1.0), "ones"))


def all_algorithms(engine: str = "horovod") -> dict:
    """Sums of vectors of many lengths by every algorithm and grid.

    Sums of small integers are exact in every type, so they must be right to the last bit; the sums
    of random numbers are compared with FP64 within one rounding per rank.
    """
    place = placement()
    from hybrid_imagenet.comm.algorithms import (
        Bfloat16AllReduce,
        HierarchicalMasters,
        RankContext,
        Ring,
        Torus,
    )

    if engine == "horovod":
        import horovod.tensorflow as hvd

        from hybrid_imagenet.comm.horovod_engine import HorovodCollectives

        known = HorovodCollectives(place.size)
    else:
        known = comm.start(CommunicationSettings(engine=engine)).collectives
    ranks = RankContext(place.rank, ["here"] * place.size, known)
    found = {"ring": Ring(ranks), "exchange": Bfloat16AllReduce(ranks)}
    for v in [v for v in range(1, place.size + 1) if place.size % v == 0]:
        grid = torus.Grid(v, place.size // v)
        found[f"torus {grid}"] = Torus(ranks, torus_grid=str(grid))
        found[f"masters {grid}"] = HierarchicalMasters(ranks, torus_grid=str(grid))
    # rows that are not contiguous, as with ranks dealt out over hosts
    if place.size in (4, 6, 8):
        dealt = RankContext(place.rank, [f"h{r % 2}" for r in range(place.size)], known)
        assert torus.rows(dealt.hosts, torus.default_grid(dealt.hosts))[0] == list(
            range(0, place.size, 2)
        )
        found["torus dealt"] = Torus(dealt, torus_grid=None)
        found["masters dealt"] = HierarchicalMasters(dealt, torus_grid=None)
    if engine == "horovod":
        hvd.init(process_sets=known.process_sets())
    c = comm.start(
        CommunicationSettings(engine=engine, compression="none")
    )  # finds Horovod started
    wrong = [one for name, algorithm in found.items() for one in _wrong_sums(c, name, algorithm)]
    return {"algorithms": sorted(found), "wrong": wrong}


def _wrong_sums(c: Communicator, name: str, algorithm) -> list:
    wrong: list = []
    import tensorflow as tf

    for number, count in enumerate((1, 18, c.size * 8 + 6)):
        dtype = (
            "bfloat16" if name == "exchange" else ("float16", "float32")[(number + len(name)) % 2]
        )
        bits = {"float16": 11, "float32": 24, "bfloat16": 8}[dtype]
        rng = np.random.default_rng([number, 1])
        values = [
            np.concatenate([rng.integers(-16, 16, count), rng.normal(size=count)])
            for _ in range(c.size)
        ]
        sent = [tf.cast(tf.constant(rank, tf.float64), dtype) for rank in values]
        got = algorithm.allreduce(sent[c.rank], f"{name}_{number}".replace(" ", "_"))
        parts = np.stack([np.asarray(rank.numpy(), np.float64) for rank in sent])
        bound = c.size * 2.0**-bits * np.abs(parts).sum(0)
        bound[:count] = 0.0  # of whole numbers
        error = np.abs(np.asarray(got.numpy(), np.float64) - parts.sum(0))
        if got.shape != (2 * count,) or got.dtype.name != dtype or (error > bound).any():
            wrong.append([name, number, dtype, list(got.shape), float(error.max())])
        # all ranks hold the same bits
        bits_here = np.asarray(got.numpy()).tobytes().hex()
        if c.allgather_object(bits_here) != [bits_here] * c.size:
            wrong.append([name, number, dtype, "ranks differ"])
    return wrong


class Reducers:
    """Reductions of any settings over the ranks of one start."""

    def __init__(self, **settings) -> None:
        others = [
            CommunicationSettings(allreduce=name) for name in ("torus", "masters", "size_switched")
        ]
        self.communicator = typing.cast(
            "ConnectedRanks", comm.start(CommunicationSettings(**settings), others=others)
        )

    def __call__(self, **settings):
        from hybrid_imagenet.comm.gradients import GradientReducer

        chosen = CommunicationSettings(**settings)
        return GradientReducer(self.communicator, chosen, self.communicator.make_selector(chosen))


def reductions(engine: str = "horovod") -> dict:
    """Means of gradients in every type and by every algorithm, and of extreme values."""
    reducer = Reducers(engine=engine, compression="none")
    return _precision(reducer) | _extremes(reducer)


def _precision(reducer: Reducers) -> dict:
    import tensorflow as tf

    c = reducer.communicator
    shapes = [(3, 3, 4), (), (1000,), (0,), (37,)]
    names = ["kernel", "scalar", "big", "empty", "dense"]
    rng = np.random.default_rng(0)
    everyone = [
        [np.float32(rng.normal(size=s) * 10.0 ** rng.uniform(-3, 3, s)) for s in shapes]
        for _ in range(c.size)
    ]
    out = {}
    cases = [("fp16", name) for name in ("ring", "torus", "masters")]
    for compression, allreduce in (
        *cases,
        ("none", "ring"),
        ("none", "size_switched"),
        ("bf16", "ring"),
    ):
        options = {"size_switch_kb": 1} if allreduce == "size_switched" else {}
        settings = {"fusion_threshold_mb": 0.001, "options": options}
        r = reducer(allreduce=allreduce, compression=compression, **settings)
        reduce = tf.function(lambda *g, r=r: means(r.reduce, g, names), autograph=False)
        got = [
            np.asarray(t.numpy(), np.float64)
            for t in reduce(*[tf.constant(g) for g in everyone[c.rank]])
        ]
        bits = {"none": 24, "fp16": 11, "bf16": 8}[compression]
        worst = 0.0
        for k in range(len(names)):
            parts = np.stack([np.float64(rank[k]) for rank in everyone]) / c.size
            # FP32 division, then the cast and N - 1 additions round: N + 1 roundings; FP16 is
            # subnormal below 2^-14.
            total = np.abs(parts).sum(0)
            bound = (c.size + 1) * (
                2.0**-bits * total + (2.0**-25 if bits == 11 else 0)
            ) + 2.0**-22 * total
            error = np.abs(got[k] - parts.sum(0))
            if error.size:
                worst = max(worst, float((error / bound).max()))
        alike = c.allgather_object([g.tobytes().hex() for g in got])
        s = r.statistics()
        algorithms, wires = (
            sorted({b[key] for b in s["buckets"]}) for key in ("algorithm", "wire")
        )
        same = all(a == alike[0] for a in alike)
        out[f"{compression} {allreduce}"] = [
            *(worst, same, s["steps"], algorithms, wires, s["exposed_ms"] >= 0, s["bytes"])
        ]
    return out


def _extremes(reducer: Reducers) -> dict:
    import tensorflow as tf

    rank = reducer.communicator.rank
    names = ["a", "b", "c", "d", "e"]
    inf, nan = np.inf, np.nan
    mine = [
        np.array([60000.0, -60000.0]),  # the sum overflows FP16, the mean does not
        np.array([2.0**-20, 2.0**-24]),  # subnormal in FP16; after division by 4 the second is lost
        np.array([inf if rank == 1 else 1.0, 1.0, nan if rank == 2 else 1.0]),
        np.array([1e6 if rank == 3 else 0.0, 1.0]),  # overflows on one rank only
        np.array([1e-9, 1.0]),  # lost in FP16
    ]
    r = reducer(compression="fp16")
    step = tf.function(lambda *g: means(r.reduce, g, names), autograph=False)
    got = step(*[tf.constant(m, tf.float32) for m in mine])
    return {"values": [[repr(float(x)) for x in g.numpy()] for g in got]}
