"""Results that the papers printed, as data.

Accuracies and efficiencies are fractions, times are in seconds. Numbers are as printed, even if
they contradict each other; `docs/dev/criteria.md` lists the contradictions. The papers: Lu, Lu,
Liang, *hybrid gradient computing*; Mikami et al., *ImageNet/ResNet-50 in a Flash*; Jia et al.,
*Training ImageNet in Four Minutes* (arXiv 1807.11205); the NCSA HAL benchmark; Goyal et al.,
*ImageNet in 1 Hour* (arXiv 1706.02677).
"""

from __future__ import annotations

import dataclasses
import re

from hybrid_imagenet.schedules import mlperf


@dataclasses.dataclass(frozen=True)
class Result:
    """One published training of ResNet-50 on ImageNet; values that are not printed are None.

    Attributes:
      source: the paper and its table.
      system: GPUs and network.
      gpus: number of GPUs.
      batch: images per step over all GPUs (the largest, if it changes).
      epochs: passes over the training set within `seconds`.
      seconds: printed time.
      top1: top-1 validation accuracy at the end.
      top5: top-5 validation accuracy at the end.
      images_per_second: throughput of all GPUs in the same run.
      efficiency: scaling efficiency in the same run.
    """

    source: str
    system: str
    gpus: int | None = None
    batch: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    top1: float | None = None
    top5: float | None = None
    images_per_second: float | None = None
    efficiency: float | None = None

    @property
    def gpu_seconds(self) -> float | None:
        """Time * GPUs: the actual average single-GPU training time of Lu et al."""
        if self.seconds is None or self.gpus is None:
            return None
        return self.seconds * self.gpus


_CLUSTER_1 = "cluster 1, 3 x 8 V100, RoCE 40G"
_CLUSTER_2 = "cluster 2, 6 x 4 P40, RoCE 40G"

RESULTS = (
    Result("Lu et al., Table 3.7", _CLUSTER_1, 24, 6144, 90, 53 * 60, 0.756, 0.9321, 36082, 0.975),
    Result("Lu et al., Table 3.7", _CLUSTER_2, 24, 3072, 90, 108 * 60, 0.7558, 0.9322, 6903, 0.94),
    Result(
        "Lu et al., Table 3.8",
        "cluster 1, to 75 % top-1",
        24,
        6144,
        32,
        18 * 60,
        0.75,
        None,
        36082,
        0.975,
    ),
    Result(
        "Lu et al., Table 3.8",
        "cluster 2, to 75 % top-1",
        24,
        3072,
        33,
        39 * 60,
        0.75,
        None,
        6903,
        0.94,
    ),
    Result(
        "Lu et al., Table 3.9",
        "cluster 1, to 93 % top-5",
        24,
        6144,
        39,
        23 * 60,
        None,
        0.93,
        36082,
        0.975,
    ),
    Result(
        "Lu et al., Table 3.9",
        "cluster 2, to 93 % top-5",
        24,
        3072,
        42,
        50 * 60,
        None,
        0.93,
        6903,
        0.94,
    ),
    # The throughputs of Table 6 are from runs with 32 images per worker, whose accuracy is not
    # printed. They do not match the times of Table 5: 90 epochs of 1.28 million images in 505 s are
    # 228,000 images/s, not 556,522.
    Result("Mikami et al., Table 5, reference", "ABCI, V100", 1024, 32768, 90, 505, 0.7540),
    Result("Mikami et al., Table 5, exp. 1", "ABCI, V100", 2176, 69632, 90, 224, 0.7503),
    Result("Mikami et al., Table 5, exp. 2", "ABCI, V100", 3456, 55296, 90, 122, 0.7529),
    Result("Mikami et al., Table 5, exp. 3", "ABCI, V100", 3456, 65536, 90, 115, 0.7462),
    Result("Mikami et al., Table 5, exp. 4", "ABCI, V100", 4096, 121856, 90, 129, 0.7523),
    Result("Jia et al.", "P40, Ethernet 100G", 2048, 65536, 90, 6.6 * 60, 0.758),
    Result(
        "Goyal et al.", "32 x 8 P100, Ethernet 50G", 256, 8192, 90, 3600, 0.763, None, None, 0.90
    ),
    # Computed by the authors from a run of 81 epochs in 66,790 s (docs/studies/hal.md).
    Result("NCSA HAL", "V100", 2, 416, 90, 74211, 0.76, 0.93),
    Result("NCSA HAL", "16 x 4 V100", 64, 13312, 90, 4071, 0.76, 0.93),
    # MLPerf's times until 75.9 % are means of the successful runs, without the fastest and the
    # slowest.
    Result("MLPerf 2.1, NVIDIA", "8 A100 80 GB", 8, 3264, 35, 28.65 * 60, 0.759),
    Result("MLPerf 2.1, NVIDIA", "64 A100 80 GB", 64, 3264, 35, 4.503 * 60, 0.759),
    Result("MLPerf 2.1, NVIDIA", "1,024 A100 80 GB", 1024, 35840, 58, 0.555 * 60, 0.759),
    Result("MLPerf 2.1, NVIDIA", "4,216 A100 80 GB", 4216, 67456, 86, 0.319 * 60, 0.759),
    Result("MLPerf 4.0, NVIDIA", "8 H100", 8, 3200, 35, 13.27 * 60, 0.759),
    Result("MLPerf 4.0, Dell", "8 H100", 8, 3200, 35, 13.16 * 60, 0.759),
    Result("MLPerf 4.0, NVIDIA", "8 H200", 8, 3200, 35, 12.03 * 60, 0.759),
    Result("MLPerf 4.0, NVIDIA", "64 H100", 64, 3200, 35, 2.505 * 60, 0.759),
    Result("MLPerf 4.0, NVIDIA", "2,528 H100", 2528, 40448, 68, 0.228 * 60, 0.759),
    Result("MLPerf 4.0, NVIDIA", "3,584 H100", 3584, 57344, 77, 0.183 * 60, 0.759),
)

LU_SINGLE_V100 = {("fp16", 128): 1377.0, ("fp16", 256): 1542.0, ("fp32", 128): 758.0}
"""Lu et al., Table 3.2: images per second of one V100 by precision and batch."""
LU_SINGLE_P40 = 295.0
"""Lu et al., section 3.2.2: images per second of one P40 in FP32 at batch 128."""

EIGHT_A100 = 27_185 / 8
"""MLPerf, NVIDIA: images per second of one of eight A100 80 GB at batch 408."""
EIGHT_H100 = 57_295 / 8
"""MLPerf, NVIDIA: images per second of one of eight H100 at batch 400."""
MIKAMI_FOUR_GPUS = 2565.0
"""Mikami et al., Table 6: images per second of one node (4 GPUs).

It is the baseline of the efficiencies in that table.
"""


def reference_epochs(global_batch: int) -> float | None:
    """Returns MLPerf's mean number of epochs until 75.9 % at a batch size.

    Between the published points it is linear in the logarithm of the batch. For other batches it is
    None.
    """
    return mlperf.point_at(global_batch).epochs if mlperf.covers(global_batch) else None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU whose training speed is published.

    Attributes:
      title: its name.
      capability: its compute capability.
    """

    title: str
    capability: tuple[int, int]

    def arithmetic(self, precision: str) -> str:
        """Returns the arithmetic (see `GpuSpeed`) that the GPU uses for a precision.

        TensorFlow computes FP32 convolutions as TF32 if the GPU supports it. On a P40, cuDNN
        computes in FP32, because the FP16 of that GPU has 1/64 of the speed.

        Args:
          precision: a value of --precision, such as `mixed_float16`.

        Raises:
          ValueError: for mixed_bfloat16 on a GPU that does not support it.
        """
        if precision == "mixed_bfloat16" and self.capability < (8, 0):
            raise ValueError(
                f"{self.title} does not support BF16. Use mixed_float16, or float32 on a P40."
            )
        if precision == "float32":
            return "tf32" if self.capability >= (8, 0) else "fp32"
        return "fp16" if self.capability >= (7, 0) else "fp32"


GPUS = {
    "p40": Gpu("Tesla P40", (6, 1)),
    "v100": Gpu("V100 SXM2", (7, 0)),
    "a100": Gpu("A100 SXM 40 GB", (8, 0)),
    "a100-80": Gpu("A100 SXM 80 GB", (8, 0)),
    "h100": Gpu("H100 SXM", (9, 0)),
    "l40s": Gpu("L40S", (8, 9)),
    "h200": Gpu("H200 SXM", (9, 0)),
}


def recognize_gpu(name: str, memory_mib: str) -> str | None:
    """Returns the key in GPUS of a device, or None if it is not in GPUS.

    Variants with a slower bus, such as `NVIDIA A100-PCIE-40GB`, count as the same GPU, because they
    are almost as fast.

    Args:
      name: name of the device, as nvidia-smi prints it.
      memory_mib: memory in MiB, as nvidia-smi prints it.
    """
    match = re.search(r"\b(P40|V100|H200|H100|L40S|A100)\b", name)
    if match is None:
        return None
    model = match[1].lower()
    if model == "a100" and memory_mib.isdigit() and int(memory_mib) > 50_000:
        return "a100-80"
    return model


@dataclasses.dataclass(frozen=True)
class GpuSpeed:
    """A published training speed of ResNet-50 at 224 pixels.

    Attributes:
      source: where it was published.
      gpu: a key of `GPUS`.
      precision: `fp16` (mixed), `bf16` (mixed), `tf32` or `fp32`.
      batch: images per GPU and step.
      images_per_second: speed of one GPU, which was one of `gpus` GPUs.
      gpus: number of GPUs in the run.
      date: the day of a measurement with this program, or "".
    """

    source: str
    gpu: str
    precision: str
    batch: int
    images_per_second: float
    gpus: int = 1
    date: str = ""

    @property
    def described_source(self) -> str:
        """The source with the date of the measurement."""
        return f"{self.source}, {self.date}" if self.date else self.source


_TENSORFLOW = "NVIDIA DeepLearningExamples, TensorFlow 1 with XLA, 20.06"
_MXNET = "NVIDIA DeepLearningExamples, MXNet, 20.12, with input"
_PADDLE = "NVIDIA DeepLearningExamples, PaddlePaddle"
_MLPERF = "MLPerf Training"
THIS_PROGRAM = "this program, synthetic data"
"""The source of speeds that were measured with this program."""

GPU_SPEEDS = (
    GpuSpeed(_TENSORFLOW, "a100", "fp16", 256, 2375),
    GpuSpeed(_TENSORFLOW, "a100", "fp16", 256, 17400 / 8, 8),
    GpuSpeed(_TENSORFLOW, "a100", "tf32", 256, 909),
    GpuSpeed(_MLPERF + " 2.1, Dell, 4 GPUs in 62.21 min", "a100", "fp16", 204, 12_117 / 4, 4),
    GpuSpeed(_MXNET, "a100-80", "fp16", 256, 2180),
    GpuSpeed(_MXNET, "a100-80", "fp16", 256, 16925 / 8, 8),
    GpuSpeed(_MXNET, "a100-80", "tf32", 256, 1022),
    GpuSpeed(_PADDLE, "a100-80", "fp16", 256, 2897),
    GpuSpeed(_PADDLE, "a100-80", "fp16", 256, 23874 / 8, 8),
    GpuSpeed(_PADDLE, "a100-80", "tf32", 256, 1024),
    GpuSpeed(_MLPERF + " 2.1, NVIDIA, 8 GPUs in 28.65 min", "a100-80", "fp16", 408, EIGHT_A100, 8),
    GpuSpeed(
        _MLPERF + " 2.1, NVIDIA, 64 GPUs in 4.50 min", "a100-80", "fp16", 51, 167_600 / 64, 64
    ),
    GpuSpeed(_TENSORFLOW + ", 16 GB", "v100", "fp16", 256, 1270),
    GpuSpeed(_TENSORFLOW + ", 16 GB", "v100", "fp16", 256, 9510 / 8, 8),
    GpuSpeed(_TENSORFLOW + ", 32 GB", "v100", "fp16", 256, 1300),
    GpuSpeed(_TENSORFLOW + ", 16 GB", "v100", "fp32", 128, 412),
    GpuSpeed(_TENSORFLOW + ", 32 GB", "v100", "fp32", 128, 432),
    GpuSpeed(_MXNET + ", 16 GB", "v100", "fp16", 192, 1376),
    GpuSpeed(_MXNET + ", 32 GB", "v100", "fp16", 256, 1492),
    GpuSpeed(_MXNET + ", 16 GB", "v100", "fp32", 96, 384),
    # The 758 images/s in FP32 on a V100 (Table 3.2) are not listed, because they would need 18.6
    # TFLOP/s, and the peak of that GPU is 15.7 (docs/dev/gpu-figures.md).
    GpuSpeed("Lu et al., Table 3.2", "v100", "fp16", 256, LU_SINGLE_V100["fp16", 256]),
    GpuSpeed("Lu et al., Table 3.2", "v100", "fp16", 128, LU_SINGLE_V100["fp16", 128]),
    GpuSpeed("Lu et al., section 3.2.2", "p40", "fp32", 128, LU_SINGLE_P40),
    GpuSpeed(_MLPERF + " 4.0, NVIDIA, 8 GPUs in 13.27 min", "h100", "fp16", 400, EIGHT_H100, 8),
    GpuSpeed(_MLPERF + " 4.0, NVIDIA, 64 GPUs in 2.505 min", "h100", "fp16", 50, 314_090 / 64, 64),
    GpuSpeed(THIS_PROGRAM, "h100", "fp16", 256, 5707),
    GpuSpeed(THIS_PROGRAM, "h100", "bf16", 256, 3912),
    GpuSpeed(THIS_PROGRAM, "h200", "fp16", 256, 6956, date="26 November 2026"),
    GpuSpeed(_MLPERF + " 4.0, NVIDIA, 8 GPUs in 12.03 min", "h200", "fp16", 400, 63_599 / 8, 8),
    GpuSpeed(_MLPERF + " 4.0, NVIDIA, 2 hosts of 4", "l40s", "fp16", 200, 14_835 / 8, 8),
)
"""Published speeds.

NVIDIA's are from the READMEs of TensorFlow/Classification/ConvNets/resnet50v1.5,
MxNet/Classification/RN50v1.5 and PaddlePaddle/Classification/RN50v1.5 in
github.com/NVIDIA/DeepLearningExamples. MLPerf's are medians over the epochs in the logs of
mlcommons/training_results_v2.1 and _v4.0.
"""


def speeds(gpu: str, precision: str, *, by_this_program: bool = False) -> list[GpuSpeed]:
    """Returns the published speeds of a GPU in an arithmetic.

    Args:
      gpu: a key of `GPUS`.
      precision: see `GpuSpeed`.
      by_this_program: return the speeds that were measured with this program, instead of the
        published ones.
    """
    return [
        speed
        for speed in GPU_SPEEDS
        if speed.gpu == gpu
        and speed.precision == precision
        and (speed.source == THIS_PROGRAM) == by_this_program
    ]
