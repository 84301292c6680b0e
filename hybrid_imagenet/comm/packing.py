"""Computes the places of tensors side by side in one vector: each starts at a whole row."""

from __future__ import annotations

ROW = 1024  # numbers; 64 bytes would do for alignment, longer rows make tables over rows short


def padded(count: int) -> int:
    """The length of `count` numbers filled up to whole rows."""
    return -(-count // ROW) * ROW
