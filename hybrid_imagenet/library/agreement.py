"""Compares over ranks what must be the same on all of them, and names the ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.training.numeric_checks import checksum


def digest(variables: Sequence[keras.Variable]) -> str:
    """Returns a checksum of variables' values in 16 hexadecimal digits; waits for the device."""
    return f"{int(checksum(variables)) % 2**64:016x}"


def check(ranks: Communicator, own: Mapping[str, Any], when: str, remedy: str) -> None:
    """Compares values over ranks; every rank calls it.

    Args:
      ranks: to compare.
      own: this rank's values by name, JSON-ready; the same names on all ranks.
      when: how the message begins.
      remedy: how it ends.

    Raises:
      SharedError: on all ranks, with each name whose values differ, these values and the ranks that have them.
    """
    rows = ranks.allgather_object({name: str(value) for name, value in own.items()})
    found = []
    for name in rows[0]:
        holders: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            holders.setdefault(row[name], []).append(str(rank))
        if len(holders) > 1:
            values = (f"{value} on rank {', '.join(holding)}" for value, holding in holders.items())
            found.append(f"{name} ({'; '.join(values)})")
    if found:
        raise SharedError(f"{when} the ranks differ in {' and '.join(found)}: {remedy}")
