"""Predicts the published efficiencies, of systems whose engine fused gradients as Horovod's
does.
"""

import dataclasses
import functools
import math
import statistics

from hybrid_imagenet.analysis.published import EIGHT_A100, EIGHT_H100
from hybrid_imagenet.comm.cost_model import BACKWARD_SHARE, gradients
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.comm.torus import PUBLISHED_GRIDS, Grid
from hybrid_imagenet.tools.plan.clusters import CLUSTERS
from hybrid_imagenet.tools.plan.network_layers import layers_of
from hybrid_imagenet.tools.plan.prediction import MIB, SWITCH, Job, best, ways

OFFERED = [name for name, known in ALGORITHMS.items() if known.cost is not None]
CYCLE, FUSION = (
    1e-3,
    64 * MIB,
)  # Horovod's engine looks at its queue every millisecond and fuses up to 64 MB


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A published scaling efficiency and where it was measured.

    `cluster` is a name of the planner's; `algorithm` one of `cost_model`'s, or `auto` where none is
    known; `wire_bytes` is the size of one gradient element in the all-reduce; `printed` the
    fraction that the paper prints; `images_per_second` all GPUs', where printed. `baseline` is set
    where the fraction is of another batch's speed: images per second of one GPU.
    """

    source: str
    cluster: str
    gpus: int
    batch: int
    precision: str
    wire_bytes: int
    algorithm: str
    printed: float
    images_per_second: float | None = None
    baseline: float | None = None

    @functools.cached_property
    def predicted(self):
        """What the planner's model gives; `auto` takes the way that a plan would recommend."""
        cluster = CLUSTERS[self.cluster]
        compute = cluster.speeds[self.precision].seconds(self.batch)
        job = Job(layers_of("resnet50"), compute, self.batch, self.wire_bytes, cluster.jitter, 1, 1)
        topology = cluster.topology(self.gpus // cluster.local_size)
        if self.algorithm == "auto":
            step = best(job, topology, ways(topology, OFFERED)).step_seconds
        else:
            grid = Grid(*PUBLISHED_GRIDS[self.gpus]) if self.algorithm == "torus" else None
            cost = functools.partial(
                ALGORITHMS[self.algorithm].cost, topology=topology, grid=grid, threshold=SWITCH
            )
            exposed = statistics.fmean(
                exposed_by_cycle(
                    job.layers, BACKWARD_SHARE * compute, self.wire_bytes, cost, phase / 4
                )
                for phase in range(4)
            )
            step = compute * (1 + cluster.jitter) + exposed
        return compute / step if self.baseline is None else self.batch / step / self.baseline

    @property
    def points(self):
        """Predicted less printed, in percentage points."""
        return 100 * (self.predicted - self.printed)


EFFICIENCIES = (
    Efficiency("Lu et al., Table 3.3", "h1", 24, 256, "fp16", 2, "ring", 0.975, 36082),
    Efficiency("Lu et al., Table 3.3", "h1", 24, 192, "fp16", 2, "ring", 0.971),
    Efficiency("Lu et al., Table 3.3", "h1", 24, 128, "fp16", 2, "ring", 0.964),
    Efficiency("Lu et al., Table 3.3", "h1", 24, 64, "fp16", 2, "ring", 0.958),
    Efficiency("Lu et al., 3.2.2", "h1", 24, 128, "fp32", 4, "ring", 0.977, 17773),
    Efficiency("Lu et al., 3.2.2", "h2", 24, 128, "fp32", 4, "ring", 0.912, 6456),
    Efficiency("Lu et al., 3.2.2", "h2", 24, 128, "fp32", 2, "ring", 0.94, 6903),
    Efficiency("Mikami et al., Table 6", "abci", 1024, 32, "fp16", 2, "torus", 0.8475, 556522),
    Efficiency("Mikami et al., Table 6", "abci", 2048, 32, "fp16", 2, "torus", 0.8310, 1091357),
    Efficiency("Mikami et al., Table 6", "abci", 3456, 32, "fp16", 2, "torus", 0.7408, 1641853),
    Efficiency("Mikami et al., Table 6", "abci", 4096, 32, "fp16", 2, "torus", 0.7344, 1929054),
    Efficiency("NCSA HAL", "hal", 64, 208, "fp16", 2, "ring", 0.57),
    # Strong scaling, relative to one of eight: the images of a GPU become fewer too. Throughputs
    # are medians over the epochs that NVIDIA's logs in mlcommons/training_results_v2.1 and _v4.0
    # print. Where epochs overlap in the log (4,216 GPUs) the throughput of the whole run is taken,
    # with its evaluations.
    Efficiency(
        "MLPerf 2.1, 64 A100",
        "a100-80",
        64,
        51,
        "fp16",
        2,
        "auto",
        0.771,
        167_600,
        baseline=EIGHT_A100,
    ),
    Efficiency(
        "MLPerf 2.1, 1,024 A100",
        "a100-80",
        1024,
        35,
        "fp16",
        2,
        "auto",
        0.679,
        2_362_000,
        baseline=EIGHT_A100,
    ),
    Efficiency(
        "MLPerf 2.1, 4,216 A100",
        "a100-80",
        4216,
        16,
        "fp16",
        2,
        "auto",
        0.402,
        5_756_000,
        baseline=EIGHT_A100,
    ),
    Efficiency(
        "MLPerf 4.0, 64 H100",
        "h100",
        64,
        50,
        "fp16",
        2,
        "auto",
        0.685,
        314_090,
        baseline=EIGHT_H100,
    ),
    Efficiency(
        "MLPerf 4.0, 2,528 H100",
        "h100",
        2528,
        16,
        "fp16",
        2,
        "auto",
        0.380,
        6_886_000,
        baseline=EIGHT_H100,
    ),
    Efficiency(
        "MLPerf 4.0, 3,584 H100",
        "h100",
        3584,
        16,
        "fp16",
        2,
        "auto",
        0.393,
        10_090_000,
        baseline=EIGHT_H100,
    ),
)


def exposed_by_cycle(layers, backward, element_bytes, cost, phase):
    """Seconds by which the exchange outlasts backpropagation: at every tick whatever is ready is
    sent, up to FUSION.
    """
    waiting, now, index = gradients(layers, backward, element_bytes), (1 - phase) * CYCLE, 0
    while index < len(waiting):
        if waiting[index][0] > now:
            now += CYCLE * max(1, math.ceil((waiting[index][0] - now) / CYCLE))
        held = 0
        while (
            index < len(waiting)
            and waiting[index][0] <= now
            and (not held or held + waiting[index][1] <= FUSION)
        ):
            held += waiting[index][1]
            index += 1
        seconds = cost(held)
        now += max(seconds, CYCLE if index < len(waiting) else 0.0)
    return max(now - backward, 0.0)
