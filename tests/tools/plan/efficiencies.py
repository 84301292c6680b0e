"""Predicts the published efficiencies, of systems whose engine fused gradients as Horovod's does."""

import dataclasses
import functools
import math
import statistics

from hybrid_imagenet.analysis import published
from hybrid_imagenet.analysis.cost_model import BACKWARD_SHARE, gradients
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.numerics.torus import PUBLISHED_GRIDS, Grid
from hybrid_imagenet.tools.plan.clusters import CLUSTERS
from hybrid_imagenet.tools.plan.layers import layers_of
from hybrid_imagenet.tools.plan.predict import MIB, SWITCH, Job, best, ways

OFFERED = [name for name, known in ALGORITHMS.items() if known.cost is not None]
CYCLE, FUSION = 1e-3, 64 * MIB  # Horovod's engine looks at its queue every millisecond and fuses up to 64 MB


@dataclasses.dataclass(frozen=True)
class Residual:
    row: published.Efficiency
    predicted: float

    @property
    def points(self):
        """Predicted less printed, in percentage points."""
        return 100 * (self.predicted - self.row.printed)


def exposed_by_cycle(layers, backward, element_bytes, cost, phase):
    """Seconds by which the exchange outlasts backpropagation: at every tick whatever is ready is sent, up to FUSION."""
    waiting, now, index = gradients(layers, backward, element_bytes), (1 - phase) * CYCLE, 0
    while index < len(waiting):
        if waiting[index][0] > now:
            now += CYCLE * max(1, math.ceil((waiting[index][0] - now) / CYCLE))
        held = 0
        while index < len(waiting) and waiting[index][0] <= now and (not held or held + waiting[index][1] <= FUSION):
            held += waiting[index][1]
            index += 1
        seconds = cost(held)
        now += max(seconds, CYCLE if index < len(waiting) else 0.0)
    return max(now - backward, 0.0)


def predicted(row):
    """The efficiency that the planner's model gives a row; `auto` takes the way that a plan would recommend."""
    cluster = CLUSTERS[row.cluster]
    compute = cluster.speeds[row.precision].seconds(row.batch)
    job = Job(layers_of("resnet50"), compute, row.batch, row.wire_bytes, cluster.jitter, 1, 1)
    topology = cluster.topology(row.gpus // cluster.local_size)
    if row.algorithm == "auto":
        step = best(job, topology, ways(topology, OFFERED)).step_seconds
    else:
        grid = Grid(*PUBLISHED_GRIDS[row.gpus]) if row.algorithm == "torus" else None
        cost = functools.partial(ALGORITHMS[row.algorithm].cost, topology=topology, grid=grid, threshold=SWITCH)
        exposed = statistics.fmean(
            exposed_by_cycle(job.layers, BACKWARD_SHARE * compute, row.wire_bytes, cost, phase / 4)
            for phase in range(4)
        )
        step = compute * (1 + cluster.jitter) + exposed
    return compute / step if row.yardstick is None else row.batch / step / row.yardstick


def residuals():
    return [Residual(row, predicted(row)) for row in published.EFFICIENCIES]
