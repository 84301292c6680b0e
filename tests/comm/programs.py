"""Programs that the tests of communication run on each rank."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from unittest import mock

import numpy as np

from hybrid_imagenet import comm
from hybrid_imagenet.cluster import hosts
from hybrid_imagenet.cluster.environment import read_placement
from hybrid_imagenet.comm import CommunicationSettings, process, torus
from hybrid_imagenet.comm.communicator import Communicator, GradientExchange
from hybrid_imagenet.errors import UserError
from tests.support.gradients import means

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.algorithms import AllReduceAlgorithm
    from hybrid_imagenet.comm.connected import ConnectedRanks
    from hybrid_imagenet.optimizers.reducer import GradientReducer

# Bits of the significand of each dtype, including the implicit first bit.
SIGNIFICAND_BITS = {"float16": 11, "float32": 24, "bfloat16": 8}


def message(call: Callable, *arguments) -> str | None:
    """Returns the message of the error that a call raises; None without an error."""
    try:
        call(*arguments)
    except (UserError, ValueError) as error:
        return str(error)
    return None


def collectives(engine: str = "horovod") -> dict:
    """Runs each collective operation once and returns the results.

    On two ranks AutoGraph converts the functions that call them, as it does with a user's own
    function. With more ranks it does not, because conversion takes seconds on each rank.
    """
    communicator = comm.start(CommunicationSettings(engine=engine))
    import tensorflow as tf

    rank = communicator.rank
    size = communicator.size
    function = functools.partial(tf.function, autograph=size == 2)
    out = {
        "rank": rank,
        "size": size,
        "local": [communicator.local_rank, communicator.local_size],
        "hosts": list(communicator.hosts),
        "horovod": "horovod" in sys.modules,
    }
    total = communicator.allreduce_sum(tf.constant([1.0, 2.0]) * (rank + 1), "s")
    out["sum"] = total.numpy().tolist()
    largest = communicator.allreduce_max(tf.constant([rank, -rank]), "m")
    out["max"] = largest.numpy().tolist()
    graph_max = function(
        lambda x: [communicator.allreduce_max(x, "n"), communicator.allreduce_max(-x, "n")]
    )
    out["graph_max"] = [float(each) for each in graph_max(tf.constant(rank - 1.5))]
    host_total = communicator.allreduce_on_host(tf.constant([1, rank]), "h")
    out["host_sum"] = host_total.numpy().tolist()
    graph_sum = function(lambda x: communicator.allreduce_sum(x, "t"))
    out["graph_sum"] = int(graph_sum(tf.constant(rank)))
    variables = [
        tf.Variable(tf.cast(tf.fill([3, 2], rank + 5), dtype))
        for dtype in ("float32", "float16", "bfloat16", "uint32", "int64", "bool")
    ]
    variables += [tf.Variable(float(rank)), tf.Variable(tf.zeros([0, 4]))]
    communicator.broadcast_variables(variables)
    out["variables"] = [np.asarray(v.numpy(), np.float64).ravel().tolist() for v in variables]
    out["object"] = communicator.broadcast_object({"from": rank, "list": [1, None, "ä"]})
    out["gathered"] = communicator.allgather_object("x" * rank)
    communicator.barrier()

    from hybrid_imagenet.optimizers.reducer import GradientReducer

    reducer = GradientReducer(communicator)

    @function
    def reduce(x):
        grads = [x * 2.0, tf.cast(x[0], tf.bfloat16), tf.cast(x, tf.float16)]
        return means(reducer.reduce, grads, ["a", "b", "c"])

    grads = reduce(tf.constant([1.0, 2.0, 3.0]) * (rank + 1))
    out["grads"] = [[g.dtype.name, g.numpy().tolist()] for g in grads]
    eager_means = means(reducer.reduce, [tf.constant([1.0]) * rank], ["d"])
    out["eager"] = [g.numpy().tolist() for g in eager_means]
    out["packed"] = _packed(communicator, reducer, function)
    communicator.shutdown()
    return out


def _packed(communicator: Communicator, reducer: GradientReducer, function: Callable) -> dict:
    """Returns how each gradient is packed, by its position in the list.

    For each gradient these are its first three elements, its padded length, and the sum of all
    other elements.
    """
    import tensorflow as tf

    traced_members: list[list[int]] = []

    @function
    def reduce(x):
        grads = [x * 2.0, tf.cast(x[0], tf.bfloat16), tf.zeros([0]), x]
        packed = reducer.reduce(grads, ["a", "b", "e", "c"])
        traced_members.extend(list(members) for members in packed.members)
        return packed.buckets

    vectors = reduce(tf.constant([1.0, 2.0, 3.0]) * (communicator.rank + 1))
    out = {}
    for vector, members in zip(vectors, traced_members, strict=True):
        rows = vector.numpy().astype(np.float64).reshape(len(members), -1)
        for position, row in zip(members, rows, strict=True):
            out[str(position)] = [row[:3].tolist(), len(row), float(row[3:].sum())]
    return out


def shared_errors(engine: str = "horovod") -> list:
    """Returns the messages of errors that all ranks raise because some ranks have one."""
    communicator = comm.start(CommunicationSettings(engine=engine))
    import tensorflow as tf

    from hybrid_imagenet.optimizers.reducer import GradientReducer

    rank = communicator.rank
    communicator.raise_first_error(None)
    error_of_rank = {1: "cannot read", 2: "no space"}
    versions = process.software_versions()
    other_versions = versions | ({"keras": "3.0"} if rank > 0 else {})
    check_versions = process._check_software_versions
    return [
        message(communicator.raise_first_error, error_of_rank.get(rank)),
        message(communicator.raise_first_error, "--x=1: too small" if rank == 0 else None),
        message(communicator.broadcast_variables, [tf.Variable(tf.zeros([2 + rank]))]),
        message(GradientReducer(communicator).reduce, [tf.zeros([2])], [f"layer_{rank}"]),
        message(check_versions, communicator, None if rank == 1 else versions),
        message(check_versions, communicator, other_versions),
    ]


def lost_rank(engine: str = "horovod") -> None:
    """Ends rank 1 while the other ranks wait for it."""
    communicator = comm.start(CommunicationSettings(engine=engine))
    if communicator.rank == 1:
        os._exit(3)
    communicator.allgather_object("waiting")


def communication_settings(
    options: Mapping = types.MappingProxyType({}), **settings
) -> CommunicationSettings:
    """Returns settings with options of the all-reduce by name."""
    return CommunicationSettings(**settings).with_options(options)


def start_error(settings: dict, hosts_of_ranks: list | None = None) -> str | None:
    """Returns the message of the error that `comm.start` raises with these settings."""
    with _as_if_on(hosts_of_ranks):
        return message(comm.start, communication_settings(**settings))


def _as_if_on(hosts_of_ranks: list | None) -> contextlib.AbstractContextManager:
    """Makes each rank report another name of its host inside the context."""
    if not hosts_of_ranks:
        return contextlib.nullcontext()
    return mock.patch.object(hosts, "host_key", lambda: [hosts_of_ranks[read_placement().rank], ""])


def process_sets(settings: dict, others: list, hosts_of_ranks: list | None) -> dict:
    """Returns Horovod's process sets, and the mean of gradients that uses them."""
    with _as_if_on(hosts_of_ranks):
        communicator = comm.start(
            communication_settings(**settings),
            additional_settings=[CommunicationSettings(allreduce=name) for name in others],
        )
        import tensorflow as tf

        from hybrid_imagenet.optimizers.reducer import GradientReducer

        all_sets = communicator.collectives._process_sets
        grads = [tf.range(1.0, 4.0) * (communicator.rank + 1)]
        reducer = GradientReducer(communicator)
        mean = means(reducer.reduce, grads, ["a"])
        return {
            "hosts": list(communicator.hosts),
            "sets": sorted(list(ranks) for ranks in all_sets if len(ranks) < communicator.size),
            "sum": [g.numpy().tolist() for g in mean],
            "algorithm": reducer.statistics()["buckets"][0]["algorithm"],
        }


def neighbors(neighbors_of_ranks: list) -> float:
    """Returns the sum of 1 over the neighbor group of this rank.

    `neighbors_of_ranks` has the `neighbors` that each rank sets.
    """
    own_neighbors = neighbors_of_ranks[read_placement().rank]
    communicator = comm.start(CommunicationSettings(engine="horovod", neighbors=own_neighbors))
    import tensorflow as tf

    return float(communicator.allreduce_neighbors(tf.constant(1.0), "ones"))


def all_algorithms(engine: str = "horovod") -> dict:
    """Checks the sums of vectors of many lengths by every algorithm and grid.

    Sums of small integers are exact in every dtype, so they must be right to the last bit. The sums
    of random numbers are compared with FP64 within one rounding per rank.
    """
    placement_of_rank = read_placement()
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

        collectives = HorovodCollectives(placement_of_rank.size)
    else:
        collectives = comm.start(CommunicationSettings(engine=engine)).collectives
    context = RankContext(placement_of_rank.rank, ["here"] * placement_of_rank.size, collectives)
    algorithms = {"ring": Ring(context), "exchange": Bfloat16AllReduce(context)}
    for vertical in range(1, placement_of_rank.size + 1):
        if placement_of_rank.size % vertical == 0:
            grid = torus.Grid(vertical, placement_of_rank.size // vertical)
            algorithms[f"torus {grid}"] = Torus(context, torus_grid=str(grid))
            algorithms[f"masters {grid}"] = HierarchicalMasters(context, torus_grid=str(grid))
    if placement_of_rank.size in (4, 6, 8):
        # Rows are not contiguous if ranks are dealt out over hosts in turn.
        dealt_hosts = [f"h{rank % 2}" for rank in range(placement_of_rank.size)]
        dealt = RankContext(placement_of_rank.rank, dealt_hosts, collectives)
        first_row = torus.rows(dealt_hosts, torus.default_grid(dealt_hosts))[0]
        assert first_row == list(range(0, placement_of_rank.size, 2))
        algorithms["torus dealt"] = Torus(dealt, torus_grid=None)
        algorithms["masters dealt"] = HierarchicalMasters(dealt, torus_grid=None)
    if engine == "horovod":
        # `comm.start` then uses the Horovod that is already running.
        hvd.init(process_sets=collectives.process_sets())
    communicator = comm.start(CommunicationSettings(engine=engine))
    wrong = []
    for name, algorithm in algorithms.items():
        wrong += _wrong_sums(communicator, name, algorithm)
    return {"algorithms": sorted(algorithms), "wrong": wrong}


def _wrong_sums(communicator: Communicator, name: str, algorithm: AllReduceAlgorithm) -> list:
    """Returns a description of each sum of the algorithm that is wrong."""
    import tensorflow as tf

    wrong: list = []
    size = communicator.size
    for number, count in enumerate((1, 18, size * 8 + 6)):
        dtype = ("float16", "float32")[(number + len(name)) % 2]
        if name == "exchange":
            dtype = "bfloat16"
        rng = np.random.default_rng([number, 1])
        # `count` whole numbers and `count` random numbers for each rank.
        values = [
            np.concatenate([rng.integers(-16, 16, count), rng.normal(size=count)])
            for _ in range(size)
        ]
        sent = [tf.cast(tf.constant(rank_values, tf.float64), dtype) for rank_values in values]
        got = algorithm.allreduce(sent[communicator.rank], f"{name}_{number}".replace(" ", "_"))
        sent_values = np.stack([np.asarray(tensor.numpy(), np.float64) for tensor in sent])
        bound = size * 2.0 ** -SIGNIFICAND_BITS[dtype] * np.abs(sent_values).sum(0)
        # The sums of whole numbers are exact.
        bound[:count] = 0.0
        error = np.abs(np.asarray(got.numpy(), np.float64) - sent_values.sum(0))
        if got.shape != (2 * count,) or got.dtype.name != dtype or (error > bound).any():
            wrong.append([name, number, dtype, list(got.shape), float(error.max())])
        # All ranks must get the same bits.
        own_bits = np.asarray(got.numpy()).tobytes().hex()
        if communicator.allgather_object(own_bits) != [own_bits] * size:
            wrong.append([name, number, dtype, "ranks differ"])
    return wrong


class ReducerFactory:
    """Creates reducers with any settings over the ranks of one `comm.start`."""

    def __init__(self, **settings) -> None:
        """Connects the ranks."""
        others = [
            CommunicationSettings(allreduce=name) for name in ("torus", "masters", "size_switched")
        ]
        self.communicator = typing.cast(
            "ConnectedRanks",
            comm.start(CommunicationSettings(**settings), additional_settings=others),
        )

    def __call__(self, compression: str, **settings) -> GradientReducer:
        from hybrid_imagenet.comm.settings import WIRE_DTYPES
        from hybrid_imagenet.optimizers.reducer import GradientReducer

        reducer_settings = communication_settings(**settings)
        selector = self.communicator.make_selector(reducer_settings)
        self.communicator.gradient_exchange = GradientExchange(reducer_settings, selector)
        return GradientReducer(self.communicator, WIRE_DTYPES[compression])


def reductions(engine: str = "horovod") -> dict:
    """Returns means of gradients in every dtype and by every algorithm, and of extreme values."""
    make_reducer = ReducerFactory(engine=engine)
    return _precision(make_reducer) | _extremes(make_reducer)


def _precision(make_reducer: ReducerFactory) -> dict:
    """Compares means with FP64, for each compression and algorithm."""
    import tensorflow as tf

    communicator = make_reducer.communicator
    size = communicator.size
    shapes = [(3, 3, 4), (), (1000,), (0,), (37,)]
    names = ["kernel", "scalar", "big", "empty", "dense"]
    rng = np.random.default_rng(0)
    grads_of_ranks = [
        [np.float32(rng.normal(size=s) * 10.0 ** rng.uniform(-3, 3, s)) for s in shapes]
        for _ in range(size)
    ]
    wire_dtypes = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}
    out = {}
    for compression, allreduce in (
        ("fp16", "ring"),
        ("fp16", "torus"),
        ("fp16", "masters"),
        ("none", "ring"),
        ("none", "size_switched"),
        ("bf16", "ring"),
    ):
        options = {"size_switch_kb": 1} if allreduce == "size_switched" else {}
        reducer = make_reducer(
            allreduce=allreduce,
            compression=compression,
            fusion_threshold_mb=0.001,
            options=options,
        )
        reduce = tf.function(
            lambda *grads, reducer=reducer: means(reducer.reduce, grads, names), autograph=False
        )
        own_grads = [tf.constant(grad) for grad in grads_of_ranks[communicator.rank]]
        got = [np.asarray(mean.numpy(), np.float64) for mean in reduce(*own_grads)]
        bits = SIGNIFICAND_BITS[wire_dtypes[compression]]
        worst = 0.0
        for position in range(len(names)):
            grads = np.stack([np.float64(rank_grads[position]) for rank_grads in grads_of_ranks])
            terms = grads / size
            # FP32 division, the cast and N - 1 additions round, which are N + 1 roundings. FP16 is
            # subnormal below 2^-14.
            magnitude = np.abs(terms).sum(0)
            subnormal = 2.0**-25 if bits == 11 else 0
            bound = (size + 1) * (2.0**-bits * magnitude + subnormal) + 2.0**-22 * magnitude
            error = np.abs(got[position] - terms.sum(0))
            if error.size:
                worst = max(worst, float((error / bound).max()))
        bits_of_ranks = communicator.allgather_object([mean.tobytes().hex() for mean in got])
        statistics = reducer.statistics()
        buckets = statistics["buckets"]
        out[f"{compression} {allreduce}"] = [
            worst,
            all(rank_bits == bits_of_ranks[0] for rank_bits in bits_of_ranks),
            statistics["steps"],
            sorted({bucket["algorithm"] for bucket in buckets}),
            sorted({bucket["wire"] for bucket in buckets}),
            statistics["exposed_ms"] >= 0,
            statistics["bytes"],
        ]
    return out


def _extremes(make_reducer: ReducerFactory) -> dict:
    """Returns the means of extreme values in FP16."""
    import tensorflow as tf

    rank = make_reducer.communicator.rank
    names = ["a", "b", "c", "d", "e"]
    inf = np.inf
    nan = np.nan
    own_grads = [
        # The sum overflows FP16, but the mean does not.
        np.array([60000.0, -60000.0]),
        # Both are subnormal in FP16. After division by 4 the second one is lost.
        np.array([2.0**-20, 2.0**-24]),
        np.array([inf if rank == 1 else 1.0, 1.0, nan if rank == 2 else 1.0]),
        # The first value overflows on one rank only.
        np.array([1e6 if rank == 3 else 0.0, 1.0]),
        # The first value is lost in FP16.
        np.array([1e-9, 1.0]),
    ]
    reducer = make_reducer(compression="fp16")
    step = tf.function(lambda *grads: means(reducer.reduce, grads, names), autograph=False)
    got = step(*[tf.constant(grad, tf.float32) for grad in own_grads])
    return {"values": [[repr(float(x)) for x in mean.numpy()] for mean in got]}
