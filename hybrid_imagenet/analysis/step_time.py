"""Computes the time of a training step whose gradients are exchanged during backpropagation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

BACKWARD_SHARE = 2 / 3
"""Backpropagation's share of a step's computation: twice the work of the forward pass."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: a kernel with what follows it.

    Attributes:
      parameters: of all of it.
      operations: multiply-adds of one image's forward pass.
      channels: of its output.
      normalizations: batch normalizations of its outputs.
    """

    parameters: int
    operations: int
    channels: int = 0
    normalizations: int = 0


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
) -> Exchange:
    """Sends buckets of fixed size as backpropagation, from the last layer to the first, makes gradients.

    A bucket is sent once it holds `fusion_bytes`, the last one when the first layer is done; one bucket is under way
    at a time.

    Args:
      layers: from input to output.
      backward_seconds: of one step.
      element_bytes: bytes per gradient element in the all-reduce.
      fusion_bytes: threshold of a bucket; 0 sends each layer by itself.
      cost: seconds for an all-reduce of N bytes.
    """
    free, held, busy = 0.0, 0, 0.0
    ready = gradients(layers, backward_seconds, element_bytes)
    buckets = []
    for number, (moment, size) in enumerate(ready, 1):
        held += size
        if held >= fusion_bytes or number == len(ready):
            seconds = cost(held)
            free = max(free, moment) + seconds
            busy += seconds
            buckets.append(held)
            held = 0
    return Exchange(busy, max(free - backward_seconds, 0.0), tuple(buckets))


def gradients(layers: Sequence[Layer], backward_seconds: float, element_bytes: int) -> list[tuple[float, int]]:
    """Computes the second at which each layer's gradient is ready, and its bytes, in the order of backpropagation.

    Backpropagation spends its time on the layers in proportion to their operations.
    """
    total = sum(layer.operations for layer in layers)
    elapsed, found = 0, []
    for layer in reversed(layers):
        elapsed += layer.operations
        found.append((backward_seconds * elapsed / total, layer.parameters * element_bytes))
    return found
