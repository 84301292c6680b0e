"""Defines the alignment of tensors that are packed into one vector."""

from __future__ import annotations

# Each tensor begins at a multiple of this many elements. For memory alignment 16 would be enough,
# but an optimizer keeps tables with one entry per row, and longer rows keep these tables short.
ROW_SIZE = 1024


def round_up_to_rows(count: int) -> int:
    """Returns `count` elements rounded up to a multiple of `ROW_SIZE`."""
    return -(-count // ROW_SIZE) * ROW_SIZE
