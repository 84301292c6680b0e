"""Groups gradients into buckets, from their sizes and the order in which they are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

WIRE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes per element of each wire dtype."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A group of gradients that are sent in one message.

    Attributes:
      members: Positions in the list of gradients, in backward order.
      wire_dtype: Name of the dtype in which they are sent.
      bytes: Size of the gradients in that dtype, without padding.
    """

    members: tuple[int, ...]
    wire_dtype: str
    bytes: int


def make_buckets(
    order: Sequence[int],
    elements: Sequence[int],
    wire_dtype: str,
    threshold_bytes: int,
    last_threshold_bytes: int | None = None,
) -> list[Bucket]:
    """Fills buckets in backward order until each holds at least `threshold_bytes`.

    A gradient that reaches the threshold alone gets its own bucket, which needs no packing. So a
    bucket of several gradients is always smaller than 2 * `threshold_bytes`. Gradients without
    elements are in no bucket.

    Args:
      order: Positions of the gradients in backward order; each position once.
      elements: Number of elements of each gradient, by position.
      wire_dtype: Name of the dtype in which gradients are sent.
      threshold_bytes: Size at which a bucket is complete; 0 gives each gradient its own bucket.
      last_threshold_bytes: Size at which a bucket is complete if at most `threshold_bytes` were
        still to come when it was begun. No computation hides the last bucket, so it should be
        small. None uses `threshold_bytes` for all buckets.

    Returns:
      The buckets in the order in which backpropagation completes them.

    Raises:
      ValueError: If `order` is not a permutation of the positions.

    Reference:
      Jia et al., arXiv 1807.11205 (tensor fusion).
    """
    if sorted(order) != list(range(len(elements))):
        raise ValueError("order must name each gradient once")
    sizes = [count * WIRE_BYTES[wire_dtype] for count in elements]
    buckets: list[Bucket] = []
    members: list[int] = []
    member_bytes = 0
    remaining_bytes = sum(sizes)
    limit = threshold_bytes
    for position in order:
        size = sizes[position]
        if size == 0:
            continue
        if not members:
            limit = threshold_bytes
            if last_threshold_bytes is not None and remaining_bytes <= threshold_bytes:
                limit = min(last_threshold_bytes, threshold_bytes)
        remaining_bytes -= size
        if size >= limit:
            buckets.append(Bucket((position,), wire_dtype, size))
            continue
        members.append(position)
        member_bytes += size
        if member_bytes >= limit:
            buckets.append(Bucket(tuple(members), wire_dtype, member_bytes))
            members = []
            member_bytes = 0
    if members:
        buckets.append(Bucket(tuple(members), wire_dtype, member_bytes))
    return buckets
