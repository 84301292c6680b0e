"""Finds the first cause why training on GPUs is slower than expected, from what a ladder of measurements found.

The ladder goes from one GPU over one host to the cluster; a cause on a lower rung is looked for first, since what is
above inherits it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

_NOTICED = 0.05  # of the step: less is not worth a cause
_FETCHES = 0.5  # copies to the host in a step; a few steps of a profile may hold one that is not of the step
ENOUGH = 0.9  # of the expected speed: published figures differ by as much


@dataclasses.dataclass(frozen=True)
class OneGpu:
    """A step of one GPU alone, in milliseconds.

    Attributes:
      images: per step.
      step: from step to step, without a profiler.
      profiled: the same under the profiler, to which the following belong.
      busy: time in which some kernel ran.
      kinds: time by kind of kernel (names of `runlog.kernels.KINDS`).
      launches: kernels per step.
      layout: of normalization, NHWC or NCHW; empty if unknown.
      tensor_cores: share of the time of convolutions in kernels for matrix units; None if unknown.
      wants_tensor_cores: whether precision and GPU allow them.
      slowed: what nvidia-smi said slows the clocks down while steps ran; empty for nothing.
      fetches: copies to the host per step.
      returned: the part of a step after which the call of the step returns; None if unknown.
    """

    images: int
    step: float
    profiled: float
    busy: float
    kinds: Mapping[str, float]
    launches: float
    layout: str = ""
    tensor_cores: float | None = None
    wants_tensor_cores: bool = True
    slowed: str = ""
    fetches: float = 0.0
    returned: float | None = None


@dataclasses.dataclass(frozen=True)
class Together:
    """Steps of several ranks, in milliseconds.

    Attributes:
      ranks: how many.
      hosts: on how many hosts.
      step: from step to step.
      compute: the same when gradients are left where they are, on all ranks at once.
      transport: what NCCL said of its way, one line.
      warning: what the doctor finds wrong with it; empty for nothing.
    """

    ranks: int
    hosts: int
    step: float
    compute: float
    transport: str
    warning: str = ""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why steps are slow: `lost` milliseconds per step, estimated."""

    what: str
    lost: float
    remedy: str


def causes(
    expected: float | None, alone: OneGpu, host: Together | None, cluster: Together | None, input_rate: float | None
) -> list[Cause]:
    """Returns the causes that were found, the first to be mended first.

    Args:
      expected: images per second of one GPU; None if unknown.
      alone: one GPU.
      host: all GPUs of one host; None if not measured.
      cluster: all GPUs of several hosts; None if not measured.
      input_rate: images per second that a host decodes; None if not measured.
    """
    found: list[Cause] = []
    slow = expected is not None and 1e3 * alone.images / alone.step < ENOUGH * expected
    if slow or expected is None:
        found += [cause for cause in _of_one(alone) if cause.lost >= _NOTICED * alone.step]
        if slow and not found:
            lost = alone.step - 1e3 * alone.images / (expected or 1.0)
            found.append(Cause("one GPU is slow and nothing stands out", lost, "compare the kernels by time below"))
    for together in filter(None, (host, cluster)):
        found += [cause for cause in _of_several(alone, together) if cause.lost >= _NOTICED * alone.step]
    reference = host or cluster
    ranks = max(1, reference.ranks // reference.hosts) if reference else 1
    step = (reference.step if reference else alone.step) / 1e3
    if input_rate is not None and input_rate < ranks * alone.images / step:
        lost = 1e3 * (ranks * alone.images / input_rate - step)
        needed = ranks * alone.images / step
        found.append(
            Cause(
                f"input: a host decodes {input_rate:,.0f} images/s and its GPUs take {needed:,.0f}",
                lost,
                "more cores, shards made with --resize, --decoder=dali: docs/input.md",
            )
        )
    return found


def _of_one(alone: OneGpu) -> Iterator[Cause]:
    """Causes on one GPU; what a slower clock costs is unknown, so it counts as all."""
    kinds = alone.kinds
    if alone.slowed:
        remedy = "nvidia-smi -q -d PERFORMANCE: power cap, heat, or clocks that were set"
        yield Cause(f"the GPU's clocks are slowed down: {alone.slowed}", alone.step, remedy)
    if alone.wants_tensor_cores and alone.tensor_cores is not None and alone.tensor_cores < 0.5:
        yield Cause(
            f"only {100 * alone.tensor_cores:.0f} % of the time of convolutions is in kernels for tensor cores",
            kinds.get("convolution", 0.0) / 2,
            "--precision=mixed_float16; the channels of a network of your own must divide by 8",
        )
    layout = kinds.get("change of layout", 0.0)
    if alone.layout == "NCHW" or layout >= _NOTICED * alone.profiled:
        yield Cause(
            f"normalization runs in {alone.layout or 'another layout'}: {layout:.1f} ms of transpositions",
            layout,
            "--persistent_batch_norm without --deterministic; TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT must not be 0",
        )
    idle = alone.profiled - alone.busy
    if alone.fetches >= _FETCHES:
        # A copy takes microseconds, and the GPU then waits until the host starts more work.
        late = f"; calls return after {100 * alone.returned:.0f} % of a step" if alone.returned is not None else ""
        yield Cause(
            f"{alone.fetches:.1f} copies to the host a step, each of which waits for the GPU{late}",
            max(idle, kinds.get("host copies", 0.0)),
            "an operation runs on the CPU: look at the gaps below, and report it",
        )
    elif idle >= _NOTICED * alone.profiled:
        yield Cause(
            f"the GPU waits {idle:.1f} ms for the host, which starts {alone.launches:.0f} kernels a step",
            idle,
            "other work on its cores? HYBRID_IMAGENET_BIND, NUMA node, TF_GPU_THREAD_MODE=gpu_private; a larger batch",
        )


def _of_several(alone: OneGpu, together: Together) -> Iterator[Cause]:
    place = f"{together.ranks} GPUs" + (f" on {together.hosts} hosts" if together.hosts > 1 else "")
    if (lost := together.compute - alone.step) > 0:
        yield Cause(
            f"{place}: a step takes {together.compute:.1f} ms before any communication, alone {alone.step:.1f} ms",
            lost,
            "what GPUs share: power, cooling, cores of the host; look at nvidia-smi on all of them, the slowest counts",
        )
    exposed = together.step - together.compute
    what = f"{place}: {exposed:.1f} ms of communication that nothing hides"
    if together.warning:
        yield Cause(f"{what}; {together.transport}", exposed, together.warning)
    else:
        remedy = "hybrid-imagenet plan tells what this network allows; bench allreduce, --fusion_threshold_mb"
        yield Cause(f"{what}; {together.transport}", exposed, remedy)
