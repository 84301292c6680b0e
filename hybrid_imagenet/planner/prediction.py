"""Predicts training times, and finds the fastest exchange of gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybrid_imagenet.analysis import published
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.comm.torus import Grid, nearest_square
from hybrid_imagenet.planner.cost_model import (
    BACKWARD_SHARE,
    COSTS,
    ExchangeTiming,
    Layer,
    Topology,
    ring_cost,
    simulate_exchange,
)

MIB = 2**20
SIZE_SWITCH_BYTES = 256 * 1024
"""Threshold of `size_switched` in bytes: the default of --size_switch_kb."""
FUSION_CHOICES_MIB = (64, 32, 16, 8, 4, 2, 1)
"""Bucket sizes to compare, largest first (see `fastest`)."""
# The model's error is one or two points of efficiency (docs/planning.md). A smaller gain does not
# justify leaving the ring, which every engine has and which also works with hosts of unequal size.
MIN_GAIN_OVER_RING = 0.02
# Steps whose times differ by less are considered equally fast.
_EQUAL_STEP_TIME = 1.0025


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A training, independent of the number of GPUs and the exchange strategy.

    Attributes:
      layers: The network, from input to output.
      compute_seconds: Computation time of one step on one GPU.
      per_gpu_batch: Images per GPU and step.
      element_bytes: Size of a gradient element in the all-reduce.
      jitter: Wait for the slowest rank, as a fraction of `compute_seconds`.
      images_per_epoch: Number of training images.
      epochs: Length of the training.
    """

    layers: Sequence[Layer]
    compute_seconds: float
    per_gpu_batch: int
    element_bytes: int
    jitter: float
    images_per_epoch: int
    epochs: int


@dataclasses.dataclass(frozen=True)
class ExchangeStrategy:
    """How gradients are exchanged.

    Attributes:
      algorithm: A value of --allreduce.
      grid: Rows and columns of a torus (--torus_grid); None for other algorithms.
      fusion_bytes: Size of a bucket (--fusion_threshold_mb).
    """

    algorithm: str
    grid: Grid | None = None
    fusion_bytes: float = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted training on a number of GPUs: one row of the planner's table.

    Attributes:
      gpus: Number of GPUs.
      strategy: How they exchange gradients.
      global_batch: Images per step over all GPUs.
      step_seconds: Time of a step.
      communication_seconds: All communication of a step.
      exposed_seconds: Communication of a step that backpropagation does not hide.
      efficiency: Speed of a GPU here, relative to its speed alone.
      images_per_second: Throughput of all GPUs.
      training_seconds: Time for all epochs of the job.
      target_seconds: Time to 75.9 % top-1, if the job needs as many epochs as MLPerf's reference.
        None if the reference has no value for the batch.
    """

    gpus: int
    strategy: ExchangeStrategy
    global_batch: int
    step_seconds: float
    communication_seconds: float
    exposed_seconds: float
    efficiency: float
    images_per_second: float
    training_seconds: float
    target_seconds: float | None


def recommend(job: TrainingJob, topology: Topology) -> Prediction:
    """Predicts the job with the exchange that a run should use.

    That is the ring, unless another algorithm is clearly faster (`MIN_GAIN_OVER_RING`). Algorithms
    that Horovod composes of several operations are not considered, because the model does not
    include their full cost (see `is_composed`).
    """
    ring = fastest(job, topology, exchange_strategies(topology, ["ring"]))
    other_algorithms = [
        name for name, algorithm in ALGORITHMS.items() if algorithm.one_operation and name != "ring"
    ]
    other = fastest(job, topology, exchange_strategies(topology, other_algorithms))
    if other.step_seconds * (1 + MIN_GAIN_OVER_RING) < ring.step_seconds:
        return other
    return ring


def fastest(
    job: TrainingJob, topology: Topology, strategies: Sequence[ExchangeStrategy]
) -> Prediction:
    """Predicts the job with the fastest strategy.

    Of those whose step is within 0.25 % of the shortest, the first one is chosen.

    Strategies are ordered by preference: simple algorithms before complicated ones, and large
    buckets before small ones, because the engine's cost per bucket is not in the model.
    """
    predictions = [predict(job, topology, strategy) for strategy in strategies]
    shortest = min(prediction.step_seconds for prediction in predictions)
    limit = _EQUAL_STEP_TIME * shortest
    return next(prediction for prediction in predictions if prediction.step_seconds <= limit)


def predict(job: TrainingJob, topology: Topology, strategy: ExchangeStrategy) -> Prediction:
    """Predicts the job on a cluster with one exchange strategy.

    A step takes Tc (1 + j) plus the exposed communication, where Tc is the computation time of one
    GPU and j the jitter. The efficiency is Tc divided by the step time.
    """
    ranks = topology.ranks
    global_batch = job.per_gpu_batch * ranks
    if ranks > 1:
        jitter = job.jitter
        communication = _communication(job, topology, strategy)
    else:
        jitter = 0.0
        communication = ExchangeTiming(0.0, 0.0, ())
    step_seconds = job.compute_seconds * (1 + jitter) + communication.exposed_seconds
    images_per_second = global_batch / step_seconds
    target_epochs = published.reference_epochs(global_batch)
    target_seconds = None
    if target_epochs is not None:
        target_seconds = target_epochs * job.images_per_epoch / images_per_second
    return Prediction(
        gpus=ranks,
        strategy=strategy,
        global_batch=global_batch,
        step_seconds=step_seconds,
        communication_seconds=communication.seconds,
        exposed_seconds=communication.exposed_seconds,
        efficiency=job.compute_seconds / step_seconds,
        images_per_second=images_per_second,
        training_seconds=job.epochs * job.images_per_epoch / images_per_second,
        target_seconds=target_seconds,
    )


def _communication(
    job: TrainingJob, topology: Topology, strategy: ExchangeStrategy
) -> ExchangeTiming:
    """Computes the communication of a step, and the exposed part of it."""
    all_reduce_seconds = COSTS.get(strategy.algorithm, ring_cost)
    return simulate_exchange(
        job.layers,
        BACKWARD_SHARE * job.compute_seconds,
        job.element_bytes,
        strategy.fusion_bytes,
        lambda size: all_reduce_seconds(size, topology, strategy.grid, SIZE_SWITCH_BYTES),
    )


def exchange_strategies(topology: Topology, algorithms: Sequence[str]) -> list[ExchangeStrategy]:
    """Returns all combinations of algorithm, torus grid and bucket size.

    They are in order of preference, as `fastest` expects: for each algorithm the grids nearest to a
    square first, and for each grid the largest buckets first.
    """
    strategies = []
    for algorithm in algorithms:
        grids: Sequence[Grid | None] = [None]
        if algorithm == "torus":
            grids = _torus_grids(topology.ranks)
        for grid in grids:
            for fusion_mib in FUSION_CHOICES_MIB:
                strategies.append(ExchangeStrategy(algorithm, grid, fusion_mib * MIB))
    return strategies


def _torus_grids(ranks: int) -> list[Grid]:
    """Returns all grids of at least 2 x 2, nearest to a square first.

    If there is none, because the number of ranks is prime, the only grid has one row.
    """
    grids = [
        Grid(ranks // columns, columns)
        for columns in range(2, ranks // 2 + 1)
        if ranks % columns == 0
    ]
    if not grids:
        return [nearest_square(ranks)]
    return sorted(grids, key=lambda grid: abs(grid.vertical - grid.horizontal))


def is_composed(strategy: ExchangeStrategy, topology: Topology) -> bool:
    """Returns whether Horovod composes the all-reduce of several operations.

    The operations are on sets of ranks, and Horovod negotiates them again at each step. The model
    does not include that cost. A torus with one row per host is not composed, because Horovod has
    it as `hierarchical`.
    """
    if ALGORITHMS[strategy.algorithm].one_operation:
        return False
    one_row_per_host = Grid(topology.hosts, topology.local_size)
    return not (strategy.algorithm == "torus" and strategy.grid == one_row_per_host)
