"""Ways to sum a bucket of gradients over all ranks, made of Horovod's collectives over sets of ranks.

Each takes a list of tensors of one type and returns their sums in the same shapes. Except for the ring, which is
Horovod's own all-reduce, they work on one flat tensor, padded once so that it can be cut evenly.

ring           one all-reduce over all ranks
hierarchical   torus with one row per host (the scheme that Horovod and NCCL call hierarchical)
masters        sum in each group, all-reduce between the first ranks of the groups, broadcast in each group (Jia et al.)
torus          reduce-scatter in rows, all-reduce in columns, all-gather in rows (Mikami et al.)
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.numerics import torus


class ProcessSets:
    """Sets of ranks that communicate among themselves. All ranks ask for the same ones in the same order.

    Sets asked for before Horovod starts are to be handed to it at its start, and stay. Later ones can be added only if
    it was told to expect that (process_sets="dynamic"). Then its thread exchanges the number of sets with the other
    ranks in every cycle, and holds meanwhile the lock that every operation needs when it is handed over: where ranks
    have to share cores, a step may wait for that lock for minutes.
    """

    def __init__(self, size: int) -> None:
        """No sets yet but that of all ranks."""
        self._all = tuple(range(size))
        self._sets = {self._all: hvd.global_process_set}
        self._added: set[tuple[int, ...]] = set()

    def get(self, ranks: Sequence[int]) -> hvd.ProcessSet:
        """The set of these ranks; on the first request made, and added if Horovod runs, by all ranks together."""
        key = tuple(sorted(ranks))
        if key not in self._sets:
            made = hvd.ProcessSet(list(key))
            if hvd.is_initialized():
                hvd.add_process_set(made)
                self._added.add(key)
            self._sets[key] = made
        return self._sets[key]

    def made(self) -> list[hvd.ProcessSet]:
        """All sets but that of all ranks, for `hvd.init`, which makes them usable."""
        return [made for key, made in self._sets.items() if key != self._all]

    def keep(self, needed: Sequence[Sequence[int]]) -> None:
        """Removes every other set that was added later: Horovod's thread spends time on each, in each of its cycles."""
        wanted = {tuple(sorted(ranks)) for ranks in needed}
        for key in sorted(self._added - wanted):
            hvd.remove_process_set(self._sets.pop(key))
            self._added.remove(key)


class Algorithm(abc.ABC):
    """A way to sum tensors over all ranks."""

    sets: list[list[int]]  # the sets of ranks, of 2 or more, in which it communicates

    @abc.abstractmethod
    def sum(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """The sums over ranks of tensors of one type, in their shapes. `name` pairs the ranks' operations."""


class Ring(Algorithm):
    """Horovod's all-reduce over all ranks; Horovod packs the tensors itself."""

    def __init__(self) -> None:
        """Needs no sets of ranks."""
        self.sets = []

    def sum(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """One grouped all-reduce."""
        return hvd.grouped_allreduce(list(tensors), op=hvd.Sum, name=name, ignore_name_scope=True)


class Flat(Algorithm):
    """An algorithm on one flat tensor, whose length must be a multiple of `parts`."""

    parts = 1

    def sum(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Packs the tensors with the padding, sums, and unpacks."""
        counts = [tensor.shape.num_elements() for tensor in tensors]
        pad = torus.padding(sum(counts), self.parts)
        pieces = [tf.reshape(tensor, [-1]) for tensor in tensors]
        if pad:
            pieces.append(tf.zeros([pad], tensors[0].dtype))
        flat = self.sum_flat(tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0], name)
        sums = tf.split(flat, [*counts, pad]) if len(pieces) > 1 else [flat]
        return [tf.reshape(s, tensor.shape) for s, tensor in zip(sums, tensors, strict=False)]

    @abc.abstractmethod
    def sum_flat(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """The sum over ranks of a tensor of shape [n], n a multiple of `parts`."""


class Torus(Flat):
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows."""

    def __init__(self, rank: int, rows: Sequence[Sequence[int]], sets: ProcessSets) -> None:
        """Makes the sets of ranks.

        Args:
          rank: this rank.
          rows: the ranks of each row; all rows of one length.
          sets: where the sets of ranks are made.
        """
        columns = torus.columns(rows)
        self.parts = len(columns)
        self.sets = [list(ranks) for ranks in [*rows, *columns] if len(ranks) > 1]
        made = {tuple(ranks): sets.get(ranks) for ranks in self.sets}
        self._row = next((made[tuple(r)] for r in rows if rank in r and len(r) > 1), None)
        self._column = next((made[tuple(c)] for c in columns if rank in c and len(c) > 1), None)

    def sum_flat(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Sends each element twice through the row and one H-th of them through the column."""
        if self._row is None and self._column is None:
            return flat
        part = flat
        if self._row is not None:
            part = hvd.reducescatter(
                part, op=hvd.Sum, name=f"{name}_scatter", process_set=self._row, ignore_name_scope=True
            )
        if self._column is not None:
            part = hvd.allreduce(
                part, op=hvd.Sum, name=f"{name}_column", process_set=self._column, ignore_name_scope=True
            )
        if self._row is not None:
            part = hvd.allgather(part, name=f"{name}_gather", process_set=self._row, ignore_name_scope=True)
        return tf.ensure_shape(part, flat.shape)


class Masters(Flat):
    """Sum in groups, all-reduce between the groups' masters (their lowest ranks), broadcast in groups.

    Horovod has no reduction to one rank. The sum in a group is an all-reduce, whose result only the master uses.
    """

    def __init__(self, rank: int, groups: Sequence[Sequence[int]], sets: ProcessSets) -> None:
        """Makes the sets of ranks; arguments as in `Torus`, with groups for rows."""
        masters = sorted(min(group) for group in groups)
        self.sets = [list(ranks) for ranks in [*groups, masters] if len(ranks) > 1]
        made = {tuple(ranks): sets.get(ranks) for ranks in self.sets}
        group = next(g for g in groups if rank in g)
        self._root = min(group)
        self._group = made.get(tuple(group))
        self._masters = made.get(tuple(masters)) if rank == self._root else None
        self._several = len(masters) > 1

    def sum_flat(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Sends all elements through the groups twice and between the masters once."""
        total = flat
        if self._group is not None:
            total = hvd.allreduce(
                total, op=hvd.Sum, name=f"{name}_group", process_set=self._group, ignore_name_scope=True
            )
        if self._masters is not None:
            total = hvd.allreduce(
                total, op=hvd.Sum, name=f"{name}_masters", process_set=self._masters, ignore_name_scope=True
            )
        if self._group is not None and self._several:
            total = hvd.broadcast(
                total, self._root, name=f"{name}_spread", process_set=self._group, ignore_name_scope=True
            )
        return total


class SixteenBitExchange(Flat):
    """The sum of bfloat16 tensors, which Horovod's all-reduce refuses, carried as 16-bit integers.

    Each rank receives its share of everyone's bits, adds them in FP32 in the order of ranks, and the rounded shares
    are gathered: the traffic of a ring in the fewest steps, with one rounding after the sum instead of one per rank.
    """

    def __init__(self, size: int) -> None:
        """For `size` ranks."""
        self.parts = size
        self.sets = []

    def sum_flat(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """All-to-all, sum, all-gather."""
        bits = hvd.alltoall(tf.bitcast(flat, tf.uint16), name=f"{name}_scatter", ignore_name_scope=True)
        shares = tf.bitcast(tf.reshape(bits, [self.parts, flat.shape[0] // self.parts]), tf.bfloat16)
        share = tf.cast(tf.reduce_sum(tf.cast(shares, tf.float32), 0), tf.bfloat16)
        gathered = hvd.allgather(tf.bitcast(share, tf.uint16), name=f"{name}_gather", ignore_name_scope=True)
        return tf.bitcast(tf.ensure_shape(gathered, flat.shape), tf.bfloat16)
