"""Implements collective operations by Horovod's, among its sets of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.comm.collectives import Collectives


class HorovodCollectives(Collectives):
    """Horovod's operations; a group is one of its sets of ranks.

    Sets asked for before Horovod starts are to be handed to it at its start, and stay. Later ones can be added only if
    it was told to expect that (process_sets="dynamic"). Then its thread exchanges the number of sets with the other
    ranks in every cycle, and holds meanwhile the lock that every operation needs when it is handed over: where ranks
    have to share cores, a step may wait for that lock for minutes.
    """

    def __init__(self, size: int) -> None:
        self._all = tuple(range(size))
        self._sets = {self._all: hvd.global_process_set}
        self._added: set[tuple[int, ...]] = set()

    def group(self, ranks: Sequence[int]) -> hvd.ProcessSet:
        """Returns the set of these ranks. The first request makes it; if Horovod runs, all ranks add it together."""
        key = tuple(sorted(ranks))
        if key not in self._sets:
            made = hvd.ProcessSet(list(key))
            if hvd.is_initialized():
                hvd.add_process_set(made)
                self._added.add(key)
            self._sets[key] = made
        return self._sets[key]

    def groups(self) -> list[list[int]]:
        """Returns the ranks of every set but the global one."""
        return [list(key) for key in self._sets if key != self._all]

    def made(self) -> list[hvd.ProcessSet]:
        """Returns all sets but the global one, for `hvd.init`, which makes them usable."""
        return [made for key, made in self._sets.items() if key != self._all]

    def keep(self, needed: Sequence[Sequence[int]]) -> None:
        """Removes every other set that was added later: Horovod's thread spends time on each, in each of its cycles."""
        wanted = {tuple(sorted(ranks)) for ranks in needed}
        for key in sorted(self._added - wanted):
            hvd.remove_process_set(self._sets.pop(key))
            self._added.remove(key)

    def allreduce(
        self, tensor: tf.Tensor, name: str, group: hvd.ProcessSet | None = None, *, scoped: bool = False
    ) -> tf.Tensor:
        where = group or hvd.global_process_set
        return hvd.allreduce(tensor, op=hvd.Sum, name=name, process_set=where, ignore_name_scope=not scoped)

    def allreduce_apart(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a group of one tensor: groups are not merged (HOROVOD_DISABLE_GROUP_FUSION)."""
        return hvd.grouped_allreduce([tensor], op=hvd.Sum, name=name, ignore_name_scope=True)[0]

    def reducescatter(self, flat: tf.Tensor, name: str, group: hvd.ProcessSet) -> tf.Tensor:
        return hvd.reducescatter(flat, op=hvd.Sum, name=name, process_set=group, ignore_name_scope=True)

    def allgather(self, flat: tf.Tensor, name: str, group: hvd.ProcessSet | None = None) -> tf.Tensor:
        """Gathers in one operation; lengths may differ."""
        where = group or hvd.global_process_set
        return hvd.allgather(flat, name=name, process_set=where, ignore_name_scope=True)

    def alltoall(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.alltoall(flat, name=name, ignore_name_scope=True)

    def broadcast(self, tensor: tf.Tensor, root: int, name: str, group: hvd.ProcessSet | None = None) -> tf.Tensor:
        where = group or hvd.global_process_set
        return hvd.broadcast(tensor, root, name=name, process_set=where, ignore_name_scope=True)
