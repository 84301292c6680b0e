"""Records how this process divided examples among ranks, so that ranks can compare it.

The ranks' parts are disjoint only if all ranks divide the same examples in the same order.
Functions that divide examples, such as `hybrid_imagenet.data.shard`, add a note. Ranks compare
their notes later, when they train, because `shard` is often called before the ranks are connected,
and sometimes on one rank only.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

# A custom loop may divide data in each epoch without ever comparing; the oldest notes are dropped.
_MAX_NOTES = 100


@dataclasses.dataclass(frozen=True)
class ShardNote:
    """Describes examples that were divided among ranks.

    Attributes:
      rank: The rank whose part was taken.
      size: Number of parts.
      facts: JSON-ready values by name that must be the same on all ranks. Lists of numbers need to
        be equal only to three digits, because different processors round differently.
    """

    rank: int
    size: int
    facts: Mapping[str, Any]


_notes: collections.deque[ShardNote] = collections.deque(maxlen=_MAX_NOTES)


def add(note: ShardNote) -> None:
    """Stores a note until `take`; a single part needs no note."""
    if note.size > 1:
        _notes.append(note)


def take(rank: int, size: int) -> list[Mapping[str, Any]]:
    """Returns the facts of this rank's notes since the last call, and removes all notes."""
    facts = [note.facts for note in _notes if (note.rank, note.size) == (rank, size)]
    _notes.clear()
    return facts
