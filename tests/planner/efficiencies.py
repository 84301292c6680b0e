"""Predicts published scaling efficiencies, to compare the planner with them.

The programs of these publications fused gradients like Horovod's engine: at each tick of a clock,
instead of when a bucket is full.
"""

import dataclasses
import functools
import math
import statistics

from hybrid_imagenet.analysis import published
from hybrid_imagenet.comm.torus import PUBLISHED_GRIDS, Grid
from hybrid_imagenet.planner.clusters import CLUSTERS
from hybrid_imagenet.planner.cost_model import BACKWARD_SHARE, COSTS, gradient_ready_times
from hybrid_imagenet.planner.network_layers import layers_of
from hybrid_imagenet.planner.prediction import (
    MIB,
    SIZE_SWITCH_BYTES,
    TrainingJob,
    exchange_strategies,
    fastest,
)

# MLPerf, NVIDIA: images per second of one of eight GPUs.
(EIGHT_A100,) = (s.images_per_second for s in published.GPU_SPEEDS if s.batch == 408)
(EIGHT_H100,) = (
    s.images_per_second for s in published.GPU_SPEEDS if (s.gpu, s.batch) == ("h100", 400)
)
# Horovod's engine looks at its queue every millisecond, and fuses up to 64 MB.
ENGINE_CYCLE_SECONDS = 1e-3
ENGINE_FUSION_BYTES = 64 * MIB


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Describes a published scaling efficiency.

    Attributes:
      source: The publication.
      cluster: A value of the planner's --cluster.
      gpus: Number of GPUs.
      batch: Images per GPU and step.
      precision: A key of the cluster's computation times.
      wire_bytes: Size of a gradient element in the all-reduce.
      algorithm: A value of --allreduce; `auto` (the fastest) if the publication names none.
      printed: The published efficiency, a fraction.
      images_per_second: Throughput of all GPUs, if published.
      baseline: Images per second of one GPU, if the efficiency is relative to another batch.
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
        """Returns the efficiency that the planner's model predicts."""
        cluster = CLUSTERS[self.cluster]
        compute = cluster.compute_times[self.precision].step_seconds(self.batch)
        job = TrainingJob(
            layers_of("resnet50"), compute, self.batch, self.wire_bytes, cluster.jitter, 1, 1
        )
        topology = cluster.topology(self.gpus // cluster.local_size)
        if self.algorithm == "auto":
            step = fastest(job, topology, exchange_strategies(topology, tuple(COSTS))).step_seconds
        else:
            grid = Grid(*PUBLISHED_GRIDS[self.gpus]) if self.algorithm == "torus" else None
            algorithm_cost = COSTS[self.algorithm]

            def cost(num_bytes):
                return algorithm_cost(num_bytes, topology, grid, SIZE_SWITCH_BYTES)

            exposed = statistics.fmean(
                exposed_by_cycle(
                    job.layers, BACKWARD_SHARE * compute, self.wire_bytes, cost, phase / 4
                )
                for phase in range(4)
            )
            step = compute * (1 + cluster.jitter) + exposed
        if self.baseline is None:
            return compute / step
        return self.batch / step / self.baseline

    @property
    def points(self):
        """Returns the predicted efficiency minus the printed one, in percentage points."""
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
    # 33,132 and 1,582 images/s are medians of the training speed in the records
    # (studies/records/hal.csv).
    Efficiency("NCSA HAL's records", "hal", 64, 208, "fp16", 2, "ring", 0.655, 33_132),
    # Strong scaling is relative to one of eight, so the images per GPU decrease too. Throughputs
    # are medians over the epochs in NVIDIA's logs in mlcommons/training_results_v2.1 and _v4.0.
    # If epochs overlap in the log (4,216 GPUs), the throughput is that of the whole run with its
    # evaluations.
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


def exposed_by_cycle(layers, backward_seconds, element_bytes, cost, phase):
    """Returns the seconds by which the exchange outlasts backpropagation with Horovod's engine.

    At each tick of its clock the engine sends the gradients that are ready, up to
    `ENGINE_FUSION_BYTES`.

    Args:
      layers: Layers from input to output.
      backward_seconds: Time of backpropagation.
      element_bytes: Bytes per gradient element.
      cost: Function from bytes to seconds of an all-reduce.
      phase: Fraction of a cycle at which backpropagation begins, 0 to 1.
    """
    ready = gradient_ready_times(layers, backward_seconds, element_bytes)
    clock = (1 - phase) * ENGINE_CYCLE_SECONDS
    sent = 0
    while sent < len(ready):
        next_ready_seconds, _ = ready[sent]
        if next_ready_seconds > clock:
            cycles = math.ceil((next_ready_seconds - clock) / ENGINE_CYCLE_SECONDS)
            clock += ENGINE_CYCLE_SECONDS * max(1, cycles)
        bucket_bytes = 0
        while sent < len(ready):
            ready_seconds, size = ready[sent]
            is_full = bucket_bytes and bucket_bytes + size > ENGINE_FUSION_BYTES
            if ready_seconds > clock or is_full:
                break
            bucket_bytes += size
            sent += 1
        # The engine does not start another operation before the next tick.
        is_last = sent == len(ready)
        clock += max(cost(bucket_bytes), 0.0 if is_last else ENGINE_CYCLE_SECONDS)
    return max(clock - backward_seconds, 0.0)
