"""Makes sets of ranks that communicate among themselves, each once."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd


class ProcessSets:
    """Sets of ranks that communicate among themselves. All ranks ask for the same ones in the same order.

    Sets asked for before Horovod starts are to be handed to it at its start, and stay. Later ones can be added only if
    it was told to expect that (process_sets="dynamic"). Then its thread exchanges the number of sets with the other
    ranks in every cycle, and holds meanwhile the lock that every operation needs when it is handed over: where ranks
    have to share cores, a step may wait for that lock for minutes.
    """

    def __init__(self, size: int) -> None:
        """Starts with no set but the global one, of all ranks."""
        self._all = tuple(range(size))
        self._sets = {self._all: hvd.global_process_set}
        self._added: set[tuple[int, ...]] = set()

    def get(self, ranks: Sequence[int]) -> hvd.ProcessSet:
        """Returns the set of these ranks. The first request makes it; if Horovod runs, all ranks add it together."""
        key = tuple(sorted(ranks))
        if key not in self._sets:
            made = hvd.ProcessSet(list(key))
            if hvd.is_initialized():
                hvd.add_process_set(made)
                self._added.add(key)
            self._sets[key] = made
        return self._sets[key]

    def made(self) -> list[hvd.ProcessSet]:
        """Returns all sets but the global one, for `hvd.init`, which makes them usable."""
        return [made for key, made in self._sets.items() if key != self._all]

    def keep(self, needed: Sequence[Sequence[int]]) -> None:
        """Removes every other set that was added later: Horovod's thread spends time on each, in each of its cycles."""
        wanted = {tuple(sorted(ranks)) for ranks in needed}
        for key in sorted(self._added - wanted):
            hvd.remove_process_set(self._sets.pop(key))
            self._added.remove(key)
