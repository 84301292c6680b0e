"""Notes in which order this process's examples are shared out, so that the ranks can compare their
notes.

The ranks' parts are disjoint only if all ranks divide the same examples in the same order. Whoever
divides them, such as `hybrid_imagenet.data.shard`, adds a note. Ranks compare the notes when they
train, and not here: `shard` is often called before the ranks are connected, and sometimes on one
rank only.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

# A custom loop may share out data at each epoch without ever comparing it; the oldest notes are
# dropped.
_MAX_NOTES = 100


@dataclasses.dataclass(frozen=True)
class Note:
    """Describes examples that were shared out.

    Attributes:
      rank: whose part was taken.
      size: number of parts.
      facts: JSON-ready values by name that must be the same on all ranks. Lists of numbers need to
        be equal to three digits only, because processors of several kinds round differently.
    """

    rank: int
    size: int
    facts: Mapping[str, Any]


_notes: collections.deque[Note] = collections.deque(maxlen=_MAX_NOTES)


def add(note: Note) -> None:
    """Keeps a note until `take`; a note about a single part is not needed."""
    if note.size > 1:
        _notes.append(note)


def take(rank: int, size: int) -> list[Mapping[str, Any]]:
    """Returns the facts of this rank's notes since the last call, and forgets all notes."""
    own = [note.facts for note in _notes if (note.rank, note.size) == (rank, size)]
    _notes.clear()
    return own
