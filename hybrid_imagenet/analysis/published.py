"""Results that the papers printed, as data: accuracies and efficiencies as fractions, times in seconds.

H = Lu et al.; S = Mikami et al.; J = Jia et al. (arXiv 1807.11205); N = NCSA HAL benchmark; G = Goyal et al. (arXiv
1706.02677). Numbers stand as printed, also where they contradict each other; `docs/criteria.md` names the places.
"""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.numerics import mlperf


@dataclasses.dataclass(frozen=True)
class Result:
    """One published training of ResNet-50 on ImageNet; None where the paper is silent.

    Attributes:
      source: the paper's letter and table.
      system: GPUs and network.
      gpus: number of processors.
      batch: images per step over all GPUs (the largest, where it changes).
      epochs: passes over the training set within `seconds`.
      seconds: printed time.
      top1: validation accuracy at the end.
      top5: validation accuracy at the end.
      images_per_second: throughput of all GPUs.
      efficiency: scaling efficiency.
    """

    source: str
    system: str
    gpus: int
    batch: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    top1: float | None = None
    top5: float | None = None
    images_per_second: float | None = None
    efficiency: float | None = None

    @property
    def gpu_seconds(self) -> float | None:
        """Time * GPUs: H's actual average single-GPU training time."""
        return None if self.seconds is None else self.seconds * self.gpus


RESULTS = (
    Result("H 3.7", "cluster 1, 3 x 8 V100, RoCE 40G", 24, 6144, 90, 53 * 60, 0.756, 0.9321, 36082, 0.975),
    Result("H 3.7", "cluster 2, 6 x 4 P40, RoCE 40G", 24, 3072, 90, 108 * 60, 0.7558, 0.9322, 6903, 0.94),
    Result("H 3.8", "cluster 1, to 75 % top-1", 24, 6144, 32, 18 * 60, 0.75, None, 36082, 0.975),
    Result("H 3.9", "cluster 1, to 93 % top-5", 24, 6144, 39, 23 * 60, None, 0.93, 36082, 0.975),
    Result("S 5, reference", "ABCI, V100", 1024, 32768, 90, 505, 0.7540, None, 556522, 0.8475),
    Result("S 5, exp. 1", "ABCI, V100", 2176, 69632, 90, 224, 0.7503),
    Result("S 5, exp. 2", "ABCI, V100", 3456, 55296, 90, 122, 0.7529, None, 1641853, 0.7408),
    Result("S 5, exp. 3", "ABCI, V100", 3456, 65536, 90, 115, 0.7462),
    Result("S 5, exp. 4", "ABCI, V100", 4096, 121856, 90, 129, 0.7523),
    Result("J", "P40, Ethernet 100G", 2048, 65536, 90, 6.6 * 60, 0.758),
    Result("G", "32 x 8 P100, Ethernet 50G", 256, 8192, 90, 3600, 0.763, None, None, 0.90),
    Result("N", "HAL, V100", 2, 416, 90, 74211, 0.76, 0.93),
    Result("N", "HAL, 16 x 4 V100", 64, 13312, 90, 4071, 0.76, 0.93),
)

H_SINGLE_V100 = {("fp16", 128): 1377.0, ("fp16", 256): 1542.0, ("fp32", 128): 758.0}
"""H, Table 3.2: images per second of one V100 by precision and batch."""
H_SINGLE_P40 = 295.0
"""H, section 3.2.2: images per second of one P40 in FP32 at batch 128."""


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A published scaling efficiency and where it was measured.

    `cluster` and `algorithm` are names of `numerics.cost_model`; `wire_bytes` is the size of one gradient element on
    the network; `printed` the fraction that the paper prints; `images_per_second` all GPUs', where printed.
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


EFFICIENCIES = (
    Efficiency("H 3.3", "h1", 24, 256, "fp16", 2, "ring", 0.975, 36082),
    Efficiency("H 3.3", "h1", 24, 192, "fp16", 2, "ring", 0.971),
    Efficiency("H 3.3", "h1", 24, 128, "fp16", 2, "ring", 0.964),
    Efficiency("H 3.3", "h1", 24, 64, "fp16", 2, "ring", 0.958),
    Efficiency("H 3.2.2", "h1", 24, 128, "fp32", 4, "ring", 0.977, 17773),
    Efficiency("H 3.2.2", "h2", 24, 128, "fp32", 4, "ring", 0.912, 6456),
    Efficiency("H 3.2.2", "h2", 24, 128, "fp32", 2, "ring", 0.94, 6903),
    Efficiency("S 6", "abci", 1024, 32, "fp16", 2, "torus", 0.8475, 556522),
    Efficiency("S 6", "abci", 2048, 32, "fp16", 2, "torus", 0.8310, 1091357),
    Efficiency("S 6", "abci", 3456, 32, "fp16", 2, "torus", 0.7408, 1641853),
    Efficiency("S 6", "abci", 4096, 32, "fp16", 2, "torus", 0.7344, 1929054),
    Efficiency("N", "hal", 64, 208, "fp16", 2, "ring", 0.57),
)

S_FOUR_GPUS = 2565.0
"""S, Table 6: images per second of one node (4 GPUs), the yardstick of its efficiencies."""
HAL_IO_GB_S = 3.30
HAL_IOPS = 36500.0
"""NCSA HAL: mean file-system bandwidth and operations per second with 64 GPUs, epochs 10 to 60."""


def reference_epochs(global_batch: int) -> float | None:
    """MLPerf's mean epochs to 75.9 % at a batch, linear in its logarithm between the points; None outside of them."""
    return mlperf.at(global_batch).epochs if mlperf.covers(global_batch) else None
