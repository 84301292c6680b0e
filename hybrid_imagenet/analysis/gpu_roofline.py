"""Predicts the training speed of one GPU from the kernels that a step's graph asks for.

A kernel takes the longest of three times: its floating-point operations at the rate that convolutions reach, its bytes
at the rate that a pass over memory reaches, and a floor. The host starts kernels one after the other, so a part of a
step takes the longer of what its kernels take and what starting them takes.

The rates are shares of the data sheet's, one set for all GPUs. What memory reaches is fitted to the published speeds of
single V100 and A100 in FP16 and TF32, what FP32 reaches to those of the V100; H100, H200 and P40 were not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from hybrid_imagenet.analysis.gpu_models import Gpu
from hybrid_imagenet.analysis.published import GPU_SPEEDS, GpuSpeed

CONVOLUTION, NORMALIZATION, POINTWISE = "convolution", "normalization", "ReLU, sums, pooling"
LAYOUT, UPDATE, OTHER = "change of layout", "update", "other"
KINDS = (CONVOLUTION, NORMALIZATION, POINTWISE, LAYOUT, UPDATE, OTHER)

MATRIX_SHARE = 0.6
"""Of the matrix units' rate, that convolutions reach: assumed, few of ResNet-50's are bound by it."""
VECTOR_SHARE = 1.44
"""Of the rate in FP32 without matrix units: fitted; above 1, as Winograd's algorithm saves a part of the operations."""
MEMORY_SHARE = 0.61
"""Of the memory's rate, that kernels reach: fitted."""
KERNEL_SECONDS = 2e-6
"""The shortest kernel, from its start to that of the next: assumed."""
LAUNCH_SECONDS = 5e-6
"""For TensorFlow's executor and the driver to start a kernel: assumed."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Kernels of one operation of the graph.

    Attributes:
      kind: one of KINDS.
      launches: kernels that it starts.
      flops: floating-point operations of matrix products and convolutions.
      bytes: that its kernels read and write.
      late: it follows the last all-reduce.
    """

    kind: str
    launches: float
    flops: float = 0.0
    bytes: float = 0.0
    late: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """All work of one kind in a step: kernels, operations, bytes, seconds on the device."""

    launches: float
    flops: float
    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted step on one GPU.

    Attributes:
      rows: by kind, all of KINDS.
      device_seconds: sum over kernels.
      step_seconds: of a step, with the time in which the device waits for the host.
      late_seconds: of what follows the last all-reduce, part of the step.
      late_launches: its kernels.
      bound: what bounds the step: `memory`, `arithmetic` or `the host's launches`.
    """

    rows: dict[str, Row]
    device_seconds: float
    step_seconds: float
    late_seconds: float
    late_launches: float
    bound: str


def seconds(work: Work, gpu: Gpu, arithmetic: str) -> float:
    """Computes the time of an operation's kernels on the device."""
    computing = work.flops / _rate(gpu, arithmetic)
    moving = work.bytes / (MEMORY_SHARE * gpu.bandwidth)
    return max(computing, moving, work.launches * KERNEL_SECONDS)


def _rate(gpu: Gpu, arithmetic: str) -> float:
    """Operations per second that convolutions reach."""
    return gpu.flops[arithmetic] * (VECTOR_SHARE if arithmetic == "fp32" else MATRIX_SHARE)


def predict(works: Iterable[Work], gpu: Gpu, arithmetic: str) -> Prediction:
    """Predicts a step.

    Args:
      works: of the step's graph.
      gpu: that runs it.
      arithmetic: of matrix products and convolutions, a key of `Gpu.flops`.
    """
    works = list(works)
    rows = {}
    for kind in KINDS:
        own = [work for work in works if work.kind == kind]
        rows[kind] = Row(
            launches=sum(work.launches for work in own),
            flops=sum(work.flops for work in own),
            bytes=sum(work.bytes for work in own),
            seconds=sum(seconds(work, gpu, arithmetic) for work in own),
        )
    parts = [[work for work in works if work.late == late] for late in (False, True)]
    device = [sum(seconds(work, gpu, arithmetic) for work in part) for part in parts]
    host = [LAUNCH_SECONDS * sum(work.launches for work in part) for part in parts]
    return Prediction(
        rows=rows,
        device_seconds=sum(device),
        # While the last all-reduce is waited for the device runs dry; the host is not ahead of it any more.
        step_seconds=max(device[0], host[0]) + max(device[1], host[1]),
        late_seconds=max(device[1], host[1]),
        late_launches=sum(work.launches for work in parts[1]),
        bound=_bound(works, gpu, arithmetic, host[0] > device[0]),
    )


def _bound(works: Sequence[Work], gpu: Gpu, arithmetic: str, by_host: bool) -> str:
    """What the larger part of the device's time is spent on, if the host keeps up."""
    if by_host:
        return "the host's launches"
    computing = moving = 0.0
    for work in works:
        products = work.flops / _rate(gpu, arithmetic)
        if products > work.bytes / (MEMORY_SHARE * gpu.bandwidth):
            computing += products
        else:
            moving += seconds(work, gpu, arithmetic)
    return "arithmetic" if computing > moving else "memory"


def published(gpu: str, arithmetic: str) -> list[GpuSpeed]:
    """Returns the published speeds of a GPU (a key of `gpu_models.GPUS`) in an arithmetic."""
    return [speed for speed in GPU_SPEEDS if (speed.gpu, speed.precision) == (gpu, arithmetic)]
