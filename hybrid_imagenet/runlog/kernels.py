"""Sorts the kernels of a GPU's profile: where the time of a step went on the device, and in which layout.

Names are those of cuDNN, cuBLAS, CUTLASS, NCCL, XLA and TensorFlow; what an operation of TensorFlow started is known by
its name and type (`tf_op`), which the profiler attaches.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from hybrid_imagenet.runlog.profile import SCOPE, Event, span

CONVOLUTION, NORMALIZATION, POINTWISE = "convolution", "normalization", "ReLU, sums, pooling"
LAYOUT, UPDATE, OTHER = "change of layout", "update", "other"
COMMUNICATION, COPIES = "communication", "host copies"
KINDS = (CONVOLUTION, NORMALIZATION, POINTWISE, LAYOUT, UPDATE, COMMUNICATION, COPIES, OTHER)

# Kernels' own names come first: a transposition for a normalization is started by the normalization's operation.
_BY_KERNEL = (
    (r"nccl", COMMUNICATION),
    (r"^Memcpy(H2D|D2H|HtoD|DtoH)", COPIES),
    (r"nchwToNhwc|nhwcToNchw|SwapDimension|ShuffleInTensor|[Tt]ranspose", LAYOUT),
    (r"bn_fw|bn_bw|batch_?norm|BatchNorm", NORMALIZATION),
)
_BY_OPERATION = (
    (SCOPE, UPDATE),
    (r":_?(Fused)?(Conv2D|MatMul)", CONVOLUTION),
    (r":_?FusedBatchNorm", NORMALIZATION),
    (r":(Relu|Add|MaxPool|AvgPool|Mean)", POINTWISE),
)
_FETCH = re.compile(r"^Memcpy(D2H|DtoH)")
_GAPS = 10
_TENSOR_CORES = re.compile(r"[hsi](884|1688|16816)|hmma|imma|tensor_?op|wgmma|gmma|xmma|cutlass|nvjet", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step: milliseconds and number per step."""

    name: str
    kind: str
    milliseconds: float
    launches: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """A time in which nothing ran: its milliseconds, and the names of what ran before and after it."""

    milliseconds: float
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Device:
    """What a GPU did per step.

    Attributes:
      step: milliseconds from the start of a step to that of the next.
      busy: milliseconds in which some kernel or copy ran.
      computing: the same, of kernels other than communication.
      launches: kernels and copies.
      fetches: copies from the GPU to the host; each waits for all that came before it.
      gaps: the longest times without any kernel or copy, of single steps.
      kernels: the longest first.
      layout: `NHWC`, `NCHW`, or `` where normalization cannot be found.
      tensor_cores: share of the time of convolutions in kernels for matrix units; None without convolutions.
    """

    step: float
    busy: float
    computing: float
    launches: float
    fetches: float
    gaps: tuple[Gap, ...]
    kernels: tuple[Kernel, ...]
    layout: str
    tensor_cores: float | None

    def by_kind(self) -> dict[str, float]:
        """Milliseconds per step of each kind, all of KINDS."""
        sums = dict.fromkeys(KINDS, 0.0)
        for kernel in self.kernels:
            sums[kernel.kind] += kernel.milliseconds
        return sums


def device(found: Sequence[Event]) -> Device | None:
    """Sums up a profile; None if it holds no kernels of a GPU.

    Raises:
      ValueError: if the profile holds no step.
    """
    count, begin, end = span(found)
    # Other lines of a device repeat what its streams did, under the names of operations and scopes.
    events = [
        e for e in found if "/device:GPU" in e.plane and e.line.startswith("Stream") and e.end > begin and e.start < end
    ]
    if not events:
        return None
    scale = 1e3 / count
    sums: dict[tuple[str, str], list[float]] = {}
    for event in events:
        entry = sums.setdefault((event.name, kind_of(event)), [0.0, 0.0])
        entry[0] += (min(event.end, end) - max(event.start, begin)) * scale
        entry[1] += 1 / count
    kernels = sorted((Kernel(*key, *entry) for key, entry in sums.items()), key=lambda k: -k.milliseconds)
    return Device(
        step=(end - begin) * scale,
        busy=_covered(events, begin, end) * scale,
        computing=_covered([e for e in events if kind_of(e) not in (COMMUNICATION, COPIES)], begin, end) * scale,
        launches=sum(kernel.launches for kernel in kernels),
        fetches=sum(kernel.launches for kernel in kernels if _FETCH.match(kernel.name)),
        gaps=_gaps(events),
        kernels=tuple(kernels),
        layout=_layout(kernels),
        tensor_cores=_tensor_cores(kernels),
    )


def kind_of(event: Event) -> str:
    """The kind of a kernel, by its own name, then by that of the operation that started it."""
    operation = str(event.facts.get("tf_op", ""))
    if SCOPE in operation:
        return UPDATE
    for pattern, kind in _BY_KERNEL:
        if re.search(pattern, event.name):
            return kind
    for pattern, kind in _BY_OPERATION:
        if re.search(pattern, operation):
            return kind
    return OTHER


def _layout(kernels: Iterable[Kernel]) -> str:
    """The layout in which most of the time of normalization is spent; transpositions beside it mean NCHW."""
    kernels = list(kernels)
    times = dict.fromkeys(("NHWC", "NCHW"), 0.0)
    for kernel in kernels:
        if kernel.kind == NORMALIZATION:
            times["NHWC" if re.search("nhwc", kernel.name, re.IGNORECASE) else "NCHW"] += kernel.milliseconds
    if not any(times.values()):
        return ""
    return max(times, key=lambda name: times[name])


def _tensor_cores(kernels: Iterable[Kernel]) -> float | None:
    convolutions = [k for k in kernels if k.kind == CONVOLUTION]
    whole = sum(k.milliseconds for k in convolutions)
    if not whole:
        return None
    return sum(k.milliseconds for k in convolutions if _TENSOR_CORES.search(k.name)) / whole


def _gaps(events: Iterable[Event]) -> tuple[Gap, ...]:
    """The longest times between the end of all that ran before and the next start."""
    found: list[Gap] = []
    last: Event | None = None
    for event in sorted(events, key=lambda e: e.start):
        if last is not None and event.start > last.end:
            found.append(Gap(1e3 * (event.start - last.end), last.name, event.name))
        last = event if last is None or event.end > last.end else last
    return tuple(sorted(found, key=lambda gap: -gap.milliseconds)[:_GAPS])


def _covered(events: Iterable[Event], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which one of the events runs."""
    total, reached = 0.0, begin
    for event in sorted(events, key=lambda e: e.start):
        start, stop = max(event.start, reached), min(event.end, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total
