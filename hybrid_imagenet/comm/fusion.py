"""Groups gradients into buckets that travel together: pure arithmetic on sizes and order of appearance."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A group of gradients that are reduced together.

    Attributes:
      members: positions in the list of gradients, in the order of appearance.
      elements: their numbers of elements.
      wire: name of the type on the wire, the same for all members.
      bytes: size on the wire.
    """

    members: tuple[int, ...]
    elements: tuple[int, ...]
    wire: str
    bytes: int


WIRE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def pack(
    order: Sequence[int], elements: Sequence[int], wires: Sequence[str], threshold: int, late: int | None = None
) -> list[Bucket]:
    """Fills buckets in the order of appearance; a bucket is closed once it holds `threshold` bytes (Jia et al.).

    A gradient that reaches the threshold by itself gets a bucket of its own, which needs no packing. So no bucket
    holds 2 * `threshold` bytes or more unless it has a single member. Empty gradients are in no bucket.

    Args:
      order: positions of the gradients by appearance in backpropagation; each position once.
      elements: number of elements of each gradient, by position.
      wires: type on the wire of each gradient, by position. Types do not mix within a bucket.
      threshold: bytes; 0 gives each gradient a bucket of its own.
      late: takes the place of `threshold` once no more than that is still to come: nothing is left to hide the last
        bucket, so it should be small. None for the same throughout.

    Returns:
      The buckets by the time at which they are complete.
    """
    if sorted(order) != list(range(len(elements))):
        raise ValueError("order must name each gradient once")
    done: list[Bucket] = []
    waiting: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    limits: dict[str, int] = {}
    to_come: collections.Counter[str] = collections.Counter()
    for count, wire in zip(elements, wires, strict=True):
        to_come[wire] += count * WIRE_BYTES[wire]
    for position in order:
        wire, size = wires[position], elements[position] * WIRE_BYTES[wires[position]]
        if size == 0:
            continue
        if wire not in waiting:
            limits[wire] = threshold if late is None or to_come[wire] > threshold else min(late, threshold)
        to_come[wire] -= size
        if size >= limits[wire]:
            done.append(_close([position], elements, wire))
            continue
        waiting.setdefault(wire, []).append(position)
        sizes[wire] = sizes.get(wire, 0) + size
        if sizes[wire] >= limits[wire]:
            done.append(_close(waiting.pop(wire), elements, wire))
            del sizes[wire]
    done.extend(_close(members, elements, wire) for wire, members in waiting.items())
    return done


def _close(members: list[int], elements: Sequence[int], wire: str) -> Bucket:
    counts = tuple(elements[m] for m in members)
    return Bucket(tuple(members), counts, wire, sum(counts) * WIRE_BYTES[wire])
