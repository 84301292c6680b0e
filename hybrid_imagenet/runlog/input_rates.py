"""Computes mean rates of reading training data over the epochs that the NCSA HAL benchmark averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = (10, 60)
"""First and last epoch, both counted, of the averages that the NCSA HAL benchmark prints."""


def mean_rate(epochs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the sum of `key` over the training seconds in the epochs of `WINDOW`; None where none has both.

    Args:
      epochs: epoch records, all or part of a run's.
      key: bytes_read or reads: what the program asks of the file system, over all ranks. Caches may serve some of it,
        so that the file system itself sees less.
    """
    rows = [r for r in epochs if WINDOW[0] <= r.get("epoch", 0) <= WINDOW[1]]
    rows = [r for r in rows if r.get(key) is not None and r.get("train_seconds")]
    seconds = sum(r["train_seconds"] for r in rows)
    return sum(r[key] for r in rows) / seconds if rows else None
