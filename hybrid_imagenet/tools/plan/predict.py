"""Predicts step time, efficiency and training time of a run, and the best way to exchange its gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from hybrid_imagenet.analysis import published
from hybrid_imagenet.analysis.cost_model import Topology, by_ring
from hybrid_imagenet.analysis.step_time import BACKWARD_SHARE, Exchange, Layer, exchange
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.numerics.torus import PUBLISHED_GRIDS, Grid, nearest_square

MIB = 2**20
FUSION_CHOICES_MB = (64, 32, 16, 8, 4, 2, 1)
SYNC_STAGE_SECONDS = 3.7e-6
"""One all-reduce of a normalization's statistics, per doubling of the GPUs.

Fitted to the only figure there is: 96.5 % in place of 97.5 % with 24 V100 (Lu et al., 3.2.3) for 53 normalizations.
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training, apart from the number of GPUs and the way to exchange gradients.

    Attributes:
      layers: of the model.
      compute_seconds: of one step on one GPU.
      batch: images per GPU and step.
      element_bytes: of a gradient element on the wire.
      jitter: relative wait for the slowest rank.
      images_per_epoch: images in the training set.
      epochs: of the whole training.
      epochs_to_target: None takes MLPerf's reference at the global batch.
      sync_batch_norm: normalization takes the statistics of all GPUs in every step.
      bn_group: it takes those of so many neighbouring GPUs.
    """

    layers: Sequence[Layer]
    compute_seconds: float
    batch: int
    element_bytes: int
    jitter: float
    images_per_epoch: int
    epochs: int
    epochs_to_target: float | None = None
    sync_batch_norm: bool = False
    bn_group: int = 1


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to exchange gradients, in buckets of `fusion_bytes`."""

    algorithm: str
    grid: Grid | None = None
    threshold: float = 256 * 1024
    fusion_bytes: float = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row of the planner's table; times in seconds, `target_seconds` None where no reference applies."""

    gpus: int
    way: Way
    global_batch: int
    step_seconds: float
    communication_seconds: float
    exposed_seconds: float
    efficiency: float
    images_per_second: float
    training_seconds: float
    target_epochs: float | None
    target_seconds: float | None


def predict(job: Job, topology: Topology, way: Way) -> Prediction:
    """Predicts one configuration: step = Tc (1 + j) + exposed communication + statistics.

    Efficiency is Tc / step. Nothing hides the exchange of statistics.
    """
    ranks = topology.ranks
    batch = job.batch * ranks
    traffic = _traffic(job, topology, way) if ranks > 1 else Exchange(0.0, 0.0, ())
    step = job.compute_seconds * (1 + (job.jitter if ranks > 1 else 0.0)) + traffic.exposed
    step += statistics_exchange(job, ranks).seconds
    rate = batch / step
    target = job.epochs_to_target if job.epochs_to_target is not None else published.reference_epochs(batch)
    return Prediction(
        gpus=ranks,
        way=way,
        global_batch=batch,
        step_seconds=step,
        communication_seconds=traffic.seconds,
        exposed_seconds=traffic.exposed,
        efficiency=job.compute_seconds / step,
        images_per_second=rate,
        training_seconds=job.epochs * job.images_per_epoch / rate,
        target_epochs=target,
        target_seconds=None if target is None else target * job.images_per_epoch / rate,
    )


@dataclasses.dataclass(frozen=True)
class StatisticsExchange:
    """The exchange of normalization's statistics in a step: GPUs of a group, all-reduces, bytes of all, seconds."""

    group: int
    exchanges: int
    bytes: int
    seconds: float


def statistics_exchange(job: Job, ranks: int) -> StatisticsExchange:
    """One all-reduce per normalization in the forward pass and one in backpropagation, of 2 c + 1 FP32 values each.

    With fewer GPUs than a group has, all of them are one. Seconds go by the number of exchanges alone; the only figure
    that they are fitted to holds the time of the bytes.
    """
    group = ranks if job.sync_batch_norm else min(job.bn_group, ranks)
    if group == 1:
        return StatisticsExchange(1, 0, 0, 0.0)
    count = 2 * sum(layer.normalizations for layer in job.layers)
    values = sum(2 * layer.normalizations * (2 * layer.channels + 1) for layer in job.layers)
    return StatisticsExchange(group, count, 4 * values, count * SYNC_STAGE_SECONDS * math.log2(group))


def _traffic(job: Job, topology: Topology, way: Way) -> Exchange:
    backward = BACKWARD_SHARE * job.compute_seconds
    cost = functools.partial(_cost, way, topology)
    return exchange(job.layers, backward, job.element_bytes, way.fusion_bytes, cost)


def _cost(way: Way, topology: Topology, size: float) -> float:
    return (ALGORITHMS[way.algorithm].cost or by_ring)(size, topology, way.grid, way.threshold)


def ways(topology: Topology, algorithms: Sequence[str], fusion: Sequence[float]) -> list[Way]:
    """Every combination to try: algorithms, grids of torus, bucket sizes in bytes."""
    found = []
    for algorithm in algorithms:
        for grid in _grids(topology.ranks) if algorithm == "torus" else [None]:
            found += [Way(algorithm, grid, fusion_bytes=size) for size in fusion]
    return found


def best(job: Job, topology: Topology, candidates: Sequence[Way]) -> Prediction:
    """The first candidate whose step is within 0.25 % of the shortest.

    Candidates come simplest first, and large buckets before small ones, whose cost in the engine is not in the model.
    """
    predictions = [predict(job, topology, way) for way in candidates]
    limit = 1.0025 * min(p.step_seconds for p in predictions)
    return next(p for p in predictions if p.step_seconds <= limit)


def published_grid(ranks: int) -> Grid:
    """Mikami et al.'s grid for a number of ranks that it has used, else the one nearest to a square."""
    return Grid(*PUBLISHED_GRIDS[ranks]) if ranks in PUBLISHED_GRIDS else nearest_square(ranks)


def _grids(ranks: int) -> list[Grid]:
    """All grids of at least two rows and columns, nearest to a square first."""
    found = [Grid(ranks // h, h) for h in range(2, ranks // 2 + 1) if ranks % h == 0]
    return sorted(found, key=lambda grid: abs(grid.vertical - grid.horizontal)) or [nearest_square(ranks)]
