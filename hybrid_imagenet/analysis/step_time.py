"""Computes the time of a training step whose gradients are exchanged during backpropagation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: a kernel with what follows it.

    Attributes:
      parameters: of all of it.
      operations: multiply-adds of one image's forward pass.
      normalizations: batch normalizations of its outputs.
      matrix: inputs and outputs of the kernel, as a matrix.
    """

    parameters: int
    operations: int
    normalizations: int = 0
    matrix: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of a step's gradients.

    Attributes:
      seconds: of communication in all.
      exposed: seconds by which it outlasts backpropagation.
      buckets: bytes of each bucket, in the order sent.
    """

    seconds: float
    exposed: float
    buckets: tuple[int, ...]


def exchange(
    layers: Sequence[Layer],
    backward_seconds: float,
    element_bytes: int,
    fusion_bytes: float,
    cost: Callable[[float], float],
    overlap: float = 1.0,
) -> Exchange:
    """Sends buckets of fixed size as backpropagation, from the last layer to the first, makes gradients.

    A bucket is sent once it holds `fusion_bytes`, the last one when the first layer is done; one bucket is under way
    at a time. Backpropagation spends its time on the layers in proportion to their operations.

    Args:
      layers: from input to output.
      backward_seconds: of one step.
      element_bytes: bytes per gradient element on the wire.
      fusion_bytes: threshold of a bucket; 0 sends each layer by itself.
      cost: seconds for an all-reduce of so many bytes.
      overlap: the speed at which communication advances during backpropagation, relative to its own (omega).
    """
    free, held, ready, busy = 0.0, 0, 0.0, 0.0
    gradients = _gradients(layers, backward_seconds, element_bytes)
    buckets = []
    for number, (ready, size) in enumerate(gradients, 1):
        held += size
        if held >= fusion_bytes or number == len(gradients):
            seconds = cost(held)
            free = _finish(max(free, ready), seconds, backward_seconds, overlap)
            busy += seconds
            buckets.append(held)
            held = 0
    return Exchange(busy, max(free - backward_seconds, 0.0), tuple(buckets))


def exchange_by_cycle(
    layers: Sequence[Layer],
    backward_seconds: float,
    element_bytes: int,
    fusion_bytes: float,
    cost: Callable[[float], float],
    cycle_seconds: float,
    phase: float = 0.0,
) -> Exchange:
    """Sends gradients as Horovod's engine fuses them: at every tick whatever is ready, up to `fusion_bytes`.

    The engine looks at its queue `cycle_seconds` apart, or as soon after as the last transfer is done. Arguments as
    for `exchange`; `phase`, from 0 to 1, is the part of a cycle at which backpropagation begins.
    """
    gradients = _gradients(layers, backward_seconds, element_bytes)
    buckets, busy, now, index = [], 0.0, (1 - phase) * cycle_seconds, 0
    while index < len(gradients):
        if gradients[index][0] > now:
            now += cycle_seconds * max(1, math.ceil((gradients[index][0] - now) / cycle_seconds))
        held = gradients[index][1]
        index += 1
        while index < len(gradients) and gradients[index][0] <= now and held + gradients[index][1] <= fusion_bytes:
            held += gradients[index][1]
            index += 1
        seconds = cost(held)
        busy += seconds
        now += max(seconds, cycle_seconds if index < len(gradients) else 0.0)
        buckets.append(held)
    return Exchange(busy, max(now - backward_seconds, 0.0), tuple(buckets))


def _gradients(layers: Sequence[Layer], backward_seconds: float, element_bytes: int) -> list[tuple[float, int]]:
    """Computes the second at which each layer's gradient is ready, and its bytes, in the order of backpropagation."""
    total = sum(layer.operations for layer in layers)
    elapsed, gradients = 0, []
    for layer in reversed(layers):
        elapsed += layer.operations
        gradients.append((backward_seconds * elapsed / total, layer.parameters * element_bytes))
    return gradients


def _finish(start: float, seconds: float, backward_seconds: float, overlap: float) -> float:
    """Computes the end of a transfer that advances at the rate `overlap` until backpropagation ends, then at rate 1."""
    hidden = max(backward_seconds - start, 0.0)
    if hidden * overlap >= seconds:
        return start + seconds / overlap
    return start + hidden + (seconds - hidden * overlap)


BACKWARD_SHARE = 2 / 3
"""Backpropagation's share of a step's computation: twice the work of the forward pass."""


def efficiency(
    compute: float, communication: float, jitter: float = 0.0, tail: float = 0.0, overlap: float = 1.0
) -> float:
    """Scaling efficiency in closed form: Tc / (Tc (1+j) + tail + max(0, Tcomm - w Tbwd)).

    Args:
      compute: Tc, seconds of computation per step on one GPU.
      communication: Tcomm, seconds of communication that may overlap.
      jitter: j, the relative wait for the slowest rank.
      tail: seconds that cannot overlap.
      overlap: w, the share of backpropagation that hides communication.
    """
    exposed = max(0.0, communication - overlap * BACKWARD_SHARE * compute)
    return compute / (compute * (1 + jitter) + tail + exposed)
