"""Predicts step time, efficiency and training time of a run, and the best way to exchange its
gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybrid_imagenet.analysis import published
from hybrid_imagenet.comm.cost_model import (
    BACKWARD_SHARE,
    Exchange,
    Layer,
    Topology,
    by_ring,
    exchange,
)
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.comm.torus import Grid, nearest_square

MIB = 2**20
SWITCH = 256 * 1024  # bytes, as --size_switch_kb has it by default
FUSION_CHOICES_MB = (64, 32, 16, 8, 4, 2, 1)
# The model's error is one or two points of efficiency (docs/planning.md). A smaller gain does not
# justify leaving the ring, which every engine has and which needs no equal hosts.
MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class Job:
    """A training, apart from the number of GPUs and the way to exchange gradients.

    Attributes:
      compute_seconds: of one step on one GPU.
      batch: images per GPU and step.
      element_bytes: of a gradient element on the wire.
      jitter: relative wait for the slowest rank.
    """

    layers: Sequence[Layer]
    compute_seconds: float
    batch: int
    element_bytes: int
    jitter: float
    images_per_epoch: int
    epochs: int


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to exchange gradients, in buckets of `fusion_bytes`."""

    algorithm: str
    grid: Grid | None = None
    fusion_bytes: float = 16 * MIB


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row of the planner's table; times in seconds, `target_seconds` None where no reference
    applies.
    """

    gpus: int
    way: Way
    global_batch: int
    step_seconds: float
    communication_seconds: float
    exposed_seconds: float
    efficiency: float
    images_per_second: float
    training_seconds: float
    target_seconds: float | None


def predict(job: Job, topology: Topology, way: Way) -> Prediction:
    """Predicts one configuration: step = Tc (1 + j) + exposed communication; efficiency is Tc /
    step.
    """
    ranks = topology.ranks
    batch = job.batch * ranks
    traffic = Exchange(0.0, 0.0, ())
    if ranks > 1:
        formula = ALGORITHMS[way.algorithm].cost or by_ring
        traffic = exchange(
            job.layers,
            BACKWARD_SHARE * job.compute_seconds,
            job.element_bytes,
            way.fusion_bytes,
            lambda size: formula(size, topology, way.grid, SWITCH),
        )
    step = job.compute_seconds * (1 + (job.jitter if ranks > 1 else 0.0)) + traffic.exposed
    rate = batch / step
    target = published.reference_epochs(batch)
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
        target_seconds=None if target is None else target * job.images_per_epoch / rate,
    )


def ways(topology: Topology, algorithms: Sequence[str]) -> list[Way]:
    """Every combination to try: algorithms, grids of torus, sizes of a bucket."""
    found = []
    for algorithm in algorithms:
        for grid in _grids(topology.ranks) if algorithm == "torus" else [None]:
            found += [Way(algorithm, grid, fusion_bytes=size * MIB) for size in FUSION_CHOICES_MB]
    return found


def best(job: Job, topology: Topology, candidates: Sequence[Way]) -> Prediction:
    """The first candidate whose step is within 0.25 % of the shortest.

    Candidates come simplest first, and large buckets before small ones, whose cost in the engine is
    not in the model.
    """
    predictions = [predict(job, topology, way) for way in candidates]
    limit = 1.0025 * min(p.step_seconds for p in predictions)
    return next(p for p in predictions if p.step_seconds <= limit)


def is_composed(way: Way, topology: Topology) -> bool:
    """Returns whether Horovod composes it of operations among sets of ranks, whose cost is not in
    the model.
    """
    host_grid = Grid(topology.hosts, topology.local_size)
    return not (
        ALGORITHMS[way.algorithm].one_operation
        or (way.algorithm == "torus" and way.grid == host_grid)
    )


def recommend(job: Job, topology: Topology) -> Prediction:
    """The way to exchange gradients that a run should take: the ring, unless another one is clearly
    faster.

    Only algorithms that Horovod has in one operation are considered (`is_composed`).
    """
    ring = best(job, topology, ways(topology, ["ring"]))
    others = [name for name, known in ALGORITHMS.items() if known.one_operation and name != "ring"]
    fastest = best(job, topology, ways(topology, others))
    return fastest if fastest.step_seconds * (1 + MARGIN) < ring.step_seconds else ring


def _grids(ranks: int) -> list[Grid]:
    """All grids of at least two rows and columns, nearest to a square first."""
    found = [Grid(ranks // h, h) for h in range(2, ranks // 2 + 1) if ranks % h == 0]
    return sorted(found, key=lambda grid: abs(grid.vertical - grid.horizontal)) or [
        nearest_square(ranks)
    ]
