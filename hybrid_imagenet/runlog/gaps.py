"""Tells which epochs' records are missing from `metrics.jsonl`, and what a checkpoint knows in their place.

Someone has deleted the file or cut it. A record of kind `gap` then says so, and every result that may lie among the
missing records is called unknown rather than guessed from the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def find(records: Iterable[Record], finished_epochs: int) -> list[int]:
    """Returns the epochs from 1 to `finished_epochs` that have neither a record nor were called missing before."""
    known: set[Any] = set()
    for record in records:
        if record.get("kind") == "epoch":
            known.add(record.get("epoch"))
        elif record.get("kind") == "gap":
            known.update(record.get("lost_epochs") or ())
    return [epoch for epoch in range(1, finished_epochs + 1) if epoch not in known]


def lost(records: Iterable[Record]) -> list[int]:
    """Returns the epochs that gap records call missing, in order."""
    return sorted({epoch for r in records if r.get("kind") == "gap" for epoch in r.get("lost_epochs") or ()})


def best(records: Iterable[Record]) -> tuple[float | None, int | None]:
    """Returns the best validation top-1 and its epoch, from epochs and gaps; the epoch is None if unknown."""
    pairs: list[tuple[float, int | None]] = []
    for record in records:
        if record.get("kind") == "epoch" and record.get("val_top1") is not None:
            pairs.append((record["val_top1"], record.get("epoch")))
        elif record.get("kind") == "gap" and record.get("best_val_top1") is not None:
            pairs.append((record["best_val_top1"], record.get("best_epoch")))
    return max(pairs, key=lambda pair: pair[0], default=(None, None))


def hides(records: Sequence[Record], metric: str, target: float, reached: float | None) -> bool:
    """Returns whether a missing epoch may have been the first to reach a target.

    Args:
      records: of the run.
      metric: `val_top1` or `val_top5`.
      target: a fraction.
      reached: the first epoch that has a record and reached it, or None.
    """
    if metric == "val_top1":
        gaps = [r for r in records if r.get("kind") == "gap"]
        if all((r.get("best_val_top1") or 0.0) < target for r in gaps):  # they cover all that is missing
            return False
    return any(reached is None or epoch < reached for epoch in lost(records))


def ranges(numbers: Iterable[int]) -> str:
    """Returns ascending numbers in words, such as `1 to 3, 7`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(parts)
