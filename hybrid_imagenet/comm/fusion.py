"""Groups gradients into buckets that travel together: pure arithmetic on sizes and order of
appearance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A group of gradients that are reduced together.

    Attributes:
      members: positions in the list of gradients, in the order of appearance.
      wire: name of the type in which they are sent.
      bytes: size in that type.
    """

    members: tuple[int, ...]
    wire: str
    bytes: int


WIRE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def pack(
    order: Sequence[int],
    elements: Sequence[int],
    wire: str,
    threshold: int,
    late: int | None = None,
) -> list[Bucket]:
    """Fills buckets in the order of appearance; a bucket is closed once it holds `threshold` bytes
    (Jia et al.).

    A gradient that reaches the threshold by itself gets a bucket of its own, which needs no
    packing. So no bucket holds 2 * `threshold` bytes or more unless it has a single member. Empty
    gradients are in no bucket.

    Args:
      order: positions of the gradients by appearance in backpropagation; each position once.
      elements: number of elements of each gradient, by position.
      wire: name of the type in which they are sent.
      threshold: bytes; 0 gives each gradient a bucket of its own.
      late: takes the place of `threshold` once no more than that is still to come: nothing is left
        to hide the last bucket, so it should be small. None for the same throughout.

    Returns:
      The buckets by the time at which they are complete.
    """
    if sorted(order) != list(range(len(elements))):
        raise ValueError("order must name each gradient once")
    sizes = [count * WIRE_BYTES[wire] for count in elements]
    done: list[Bucket] = []
    waiting: list[int] = []
    to_come, limit = sum(sizes), threshold
    for position in filter(sizes.__getitem__, order):
        if not waiting:
            limit = threshold if late is None or to_come > threshold else min(late, threshold)
        to_come -= sizes[position]
        if sizes[position] >= limit:
            done.append(_close([position], elements, wire))
            continue
        waiting.append(position)
        if sum(sizes[i] for i in waiting) >= limit:
            done.append(_close(waiting, elements, wire))
            waiting = []
    return [*done, _close(waiting, elements, wire)] if waiting else done


def _close(members: list[int], elements: Sequence[int], wire: str) -> Bucket:
    return Bucket(tuple(members), wire, sum(elements[m] for m in members) * WIRE_BYTES[wire])
