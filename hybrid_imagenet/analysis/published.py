"""Reads the published and measured figures in `published.json`.

The file says where each number is from. Numbers are as printed, even if they contradict each other;
`docs/papers.md` lists the contradictions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_imagenet.schedules import mlperf

THIS_PROGRAM = "this program, synthetic data"
"""The source of speeds that were measured with this program."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One published training of ResNet-50 on ImageNet; values that are not printed are None.

    Attributes:
      source: The paper and its table.
      system: GPUs and network.
      gpus: Number of GPUs.
      batch: Images per step over all GPUs (the largest, if it changes).
      epochs: Passes over the training set within `seconds`.
      seconds: Printed time.
      top1: Top-1 validation accuracy at the end.
      top5: Top-5 validation accuracy at the end.
      images_per_second: Throughput of all GPUs in the same run.
      efficiency: Scaling efficiency in the same run.
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


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU whose training speed is published.

    Attributes:
      title: Its name.
      capability: Its compute capability.
    """

    title: str
    capability: tuple[int, int]

    def arithmetic(self, precision: str) -> str:
        """Returns the arithmetic (see `GpuSpeed`) that the GPU uses for a precision.

        TensorFlow computes FP32 convolutions as TF32 if the GPU supports it. On a P40, cuDNN
        computes in FP32, because the FP16 of that GPU has 1/64 of the speed.

        Args:
          precision: A value of --precision, such as `mixed_float16`.

        Raises:
          ValueError: For mixed_bfloat16 on a GPU that does not support it.
        """
        if precision == "mixed_bfloat16" and self.capability < (8, 0):
            raise ValueError(
                f"{self.title} does not support BF16. Use mixed_float16, or float32 on a P40."
            )
        if precision == "float32":
            return "tf32" if self.capability >= (8, 0) else "fp32"
        return "fp16" if self.capability >= (7, 0) else "fp32"


@dataclasses.dataclass(frozen=True)
class GpuSpeed:
    """A published training speed of ResNet-50 at 224 pixels.

    Attributes:
      source: Publication of the figure.
      gpu: A key of `GPUS`.
      precision: `fp16` (mixed), `bf16` (mixed), `tf32` or `fp32`.
      batch: Images per GPU and step.
      images_per_second: Speed of one GPU, which was one of `gpus` GPUs.
      gpus: Number of GPUs in the run.
      date: The day of a measurement with this program, or "".
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


def _gpu_speed(row: Mapping[str, Any]) -> GpuSpeed:
    """Returns a row of `published.json` with the speed of one GPU instead of all GPUs."""
    return GpuSpeed(
        source=row["source"],
        gpu=row["gpu"],
        precision=row["precision"],
        batch=row["batch"],
        images_per_second=row["images_per_second"] / row["gpus"],
        gpus=row["gpus"],
        date=row.get("date", ""),
    )


_FIGURES = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
RESULTS = tuple(Result(**row) for row in _FIGURES["results"])
GPUS = {key: Gpu(row["title"], tuple(row["capability"])) for key, row in _FIGURES["gpus"].items()}
GPU_SPEEDS = tuple(_gpu_speed(row) for row in _FIGURES["gpu_speeds"])
"""Speeds that a GPU is compared with."""
_OTHER_SPEEDS = tuple(_gpu_speed(row) for row in _FIGURES["other_speeds"])


def speeds_in(source: str) -> list[GpuSpeed]:
    """Returns all speeds of a source, also those that no GPU is compared with."""
    return [speed for speed in (*GPU_SPEEDS, *_OTHER_SPEEDS) if speed.source == source]


LU_SINGLE_V100 = {
    (speed.precision, speed.batch): speed.images_per_second
    for speed in speeds_in("Lu et al., Table 3.2")
}
"""Images per second of one V100 by precision and batch."""


def speeds(gpu: str, precision: str, *, by_this_program: bool = False) -> list[GpuSpeed]:
    """Returns the published speeds of a GPU in an arithmetic.

    Args:
      gpu: A key of `GPUS`.
      precision: See `GpuSpeed`.
      by_this_program: Return the speeds that were measured with this program, instead of the
        published ones.
    """
    return [
        speed
        for speed in GPU_SPEEDS
        if speed.gpu == gpu
        and speed.precision == precision
        and (speed.source == THIS_PROGRAM) == by_this_program
    ]


def recognize_gpu(name: str, memory_mib: str) -> str | None:
    """Returns the key in GPUS of a device, or None if it is not in GPUS.

    Variants with a slower bus, such as `NVIDIA A100-PCIE-40GB`, count as the same GPU, because they
    are almost as fast.

    Args:
      name: Name of the device, as nvidia-smi prints it.
      memory_mib: Memory in MiB, as nvidia-smi prints it.
    """
    match = re.search(r"\b(P40|V100|H200|H100|L40S|A100)\b", name)
    if match is None:
        return None
    model = match[1].lower()
    if model == "a100" and memory_mib.isdigit() and int(memory_mib) > 50_000:
        return "a100-80"
    return model


def reference_epochs(global_batch: int) -> float | None:
    """Returns MLPerf's mean number of epochs until 75.9 % at a batch size.

    Between the published points it is linear in the logarithm of the batch. For other batches it is
    None.
    """
    return mlperf.point_at(global_batch).epochs if mlperf.covers(global_batch) else None


def decoding_cores(images_per_second: float, *, resized: bool = False) -> int:
    """Returns the number of CPU cores that decode as fast as GPUs train.

    Args:
      images_per_second: Speed of training, of one GPU or of all GPUs of a host.
      resized: Whether the images are shards with a shorter side of 256 pixels.
    """
    rate = _FIGURES["decoding"]["images_per_core_second"]
    if resized:
        rate *= _FIGURES["decoding"]["resized_speedup"]
    return max(1, math.ceil(images_per_second / rate))
