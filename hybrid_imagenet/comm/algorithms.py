"""Composes all-reduces over all ranks from collectives among groups of ranks.

Each algorithm takes the vector of a bucket and returns its sum over all ranks. The ring is the
all-reduce of the engine itself. The others pad the vector, so that it can be split evenly.

| --allreduce     | algorithm                                                    | reference      |
|-----------------|--------------------------------------------------------------|----------------|
| `ring`          | one all-reduce over all ranks                                |                |
| `hierarchical`  | a torus with one row per host, as Horovod and NCCL name it   |                |
| `masters`       | sum in each group, all-reduce between the groups' first      | Jia et al.     |
|                 | ranks, broadcast in each group                               |                |
| `size_switched` | masters for small buckets, the ring for large ones           | Jia et al.     |
| `torus`         | reduce-scatter in rows, all-reduce in columns, all-gather in | Mikami et al.  |
|                 | rows                                                         |                |
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import pkgutil
import typing
from collections.abc import Sequence

import tensorflow as tf

from hybrid_imagenet.comm import torus
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.fusion import Bucket
from hybrid_imagenet.comm.settings import (
    ALGORITHMS,
    AllReduceOptions,
    CommunicationSettings,
    GridOptions,
)
from hybrid_imagenet.errors import UserError


class AlgorithmSelector:
    """Selects the all-reduce algorithm of each bucket, the same on all ranks."""

    def __init__(
        self,
        context: RankContext,
        settings: CommunicationSettings,
        *,
        native_algorithm: bool = False,
    ) -> None:
        """Creates the algorithms and their groups of ranks. Every rank must do so.

        Args:
          context: The ranks. A process must use the same `collectives` object for all selectors of
            an engine, because Horovod rejects a second process set with the same ranks.
          settings: The algorithm and its options.
          native_algorithm: Whether the engine's own all-reduce already runs the algorithm of
            `settings`, so that it need not be composed.

        Raises:
          UserError: If the algorithm needs hosts with equal numbers of ranks.
          ValueError: If the grid does not hold all ranks.
        """
        self._bfloat16_algorithm = Bfloat16AllReduce(context)
        self._algorithm: AllReduceAlgorithm
        if native_algorithm:
            self._algorithm = Ring(context)
        else:
            self._algorithm = make_algorithm(settings.allreduce, context, settings.options)
        self._algorithm.name = settings.allreduce

    def algorithm_for(self, bucket: Bucket) -> AllReduceAlgorithm:
        """Returns the algorithm that sums a bucket."""
        if bucket.wire_dtype == "bfloat16":
            return self._bfloat16_algorithm
        return self._algorithm.for_size(bucket.bytes)


@dataclasses.dataclass(frozen=True)
class RankContext:
    """The ranks among which an algorithm works.

    Attributes:
      rank: This process's rank.
      hosts: Host of every rank.
      collectives: The engine's collectives, which connect the ranks.
    """

    rank: int
    hosts: Sequence[str]
    collectives: Collectives


class AllReduceAlgorithm(abc.ABC):
    """Sums a vector over all ranks.

    A constructor takes a `RankContext` and, by name, the options that `comm.settings.ALGORITHMS`
    declares for the algorithm. It creates the groups of ranks that the algorithm needs. All ranks
    must create the same algorithms in the same order, because all ranks must create all groups.

    Attributes:
      name: The name in logs and statistics: the key in `ALGORITHMS`, which `make_algorithm` sets.
    """

    name = ""

    @classmethod
    def has_one_row_per_host(cls, hosts: Sequence[str], options: AllReduceOptions) -> bool:
        """Returns whether this is a torus with one row per host.

        Horovod has that algorithm itself for NCCL.

        Args:
          hosts: Host of every rank.
          options: Options of the algorithm.
        """
        del hosts, options
        return False

    def for_size(self, num_bytes: int) -> AllReduceAlgorithm:
        """Returns the algorithm for buckets of this size, which may be this one itself."""
        del num_bytes
        return self

    @abc.abstractmethod
    def allreduce(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a vector over all ranks.

        Args:
          vector: Shape [n] and dtype, the same on all ranks.
          name: Prefix of the names of the collectives, which pairs them with those of other ranks;
            unique among sums that run at the same time.

        Returns:
          The sum, with the shape and dtype of `vector`.
        """


def make_algorithm(
    name: str, context: RankContext, options: AllReduceOptions
) -> AllReduceAlgorithm:
    """Creates the algorithm that `--allreduce=name` selects.

    Args:
      name: A key of `comm.settings.ALGORITHMS`.
      context: The ranks.
      options: Options of the algorithm, which are arguments of its constructor.

    Raises:
      UserError: If the algorithm needs hosts with equal numbers of ranks.
      ValueError: If the grid does not hold all ranks.
    """
    spec = ALGORITHMS[name]
    constructor = pkgutil.resolve_name(spec.constructor)
    algorithm: AllReduceAlgorithm = constructor(context, **vars(options))
    algorithm.name = name
    return algorithm


class Ring(AllReduceAlgorithm):
    """The engine's all-reduce over all ranks."""

    def __init__(self, context: RankContext) -> None:
        """Needs no groups."""
        self._collectives = context.collectives

    def allreduce(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        return self._collectives.allreduce_unfused(vector, name)


class EvenlySplitAllReduce(AllReduceAlgorithm):
    """Pads the vector, so that it can be split into `num_chunks` chunks of equal length."""

    num_chunks = 1

    def allreduce(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        length = vector.shape[0]
        padding = -length % self.num_chunks
        if padding == 0:
            return self.allreduce_padded(vector, name)
        padded_vector = tf.pad(vector, [[0, padding]])
        return self.allreduce_padded(padded_vector, name)[:length]

    @abc.abstractmethod
    def allreduce_padded(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a vector [n] over all ranks, where n is divisible by `num_chunks`."""


class Torus(EvenlySplitAllReduce):
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows.

    Reference:
      Mikami et al., arXiv 1811.05233.
    """

    @classmethod
    def has_one_row_per_host(cls, hosts: Sequence[str], options: AllReduceOptions) -> bool:
        """Returns whether each row of the grid has all ranks of one host."""
        assert isinstance(options, GridOptions)
        return _parse_grid(options.torus_grid, hosts) == torus.host_grid(hosts)

    def __init__(self, context: RankContext, *, torus_grid: str | None) -> None:
        """Creates a group for each row and each column.

        Args:
          context: The ranks.
          torus_grid: Grid as VxH; None for `torus.default_grid`.

        Raises:
          ValueError: If the grid does not hold all ranks.
        """
        rows = torus.rows(context.hosts, _parse_grid(torus_grid, context.hosts))
        columns = torus.columns(rows)
        self.num_chunks = len(columns)
        self._collectives = context.collectives
        groups = _create_groups(context, [*rows, *columns])
        self._row = groups.get(_members_with(context.rank, rows))
        self._column = groups.get(_members_with(context.rank, columns))

    def allreduce_padded(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sends each element twice in the row, and 1/H of the elements in the column.

        H is the number of ranks in a row. A row or column of one rank sends nothing.
        """
        if self._row is None and self._column is None:
            return vector
        total = vector
        if self._row is not None:
            total = self._collectives.reducescatter(total, f"{name}_scatter", self._row)
        if self._column is not None:
            total = self._collectives.allreduce(total, f"{name}_column", self._column)
        if self._row is not None:
            total = self._collectives.allgather(total, f"{name}_gather", self._row)
        return tf.ensure_shape(total, vector.shape)


class Hierarchical(Torus):
    """A torus with one row per host."""

    @classmethod
    def has_one_row_per_host(cls, hosts: Sequence[str], options: AllReduceOptions) -> bool:
        """Returns whether the hosts have equal numbers of ranks."""
        return torus.host_grid(hosts) is not None

    def __init__(self, context: RankContext) -> None:
        """Creates a group for each host, and one for each position in the hosts.

        Args:
          context: The ranks.

        Raises:
          UserError: If the hosts have different numbers of ranks.
        """
        grid = torus.host_grid(context.hosts)
        if grid is None:
            ranks_per_host = collections.Counter(context.hosts)
            counts = ", ".join(f"{host} {count}" for host, count in ranks_per_host.items())
            raise UserError(
                "--allreduce=hierarchical: the hosts have different numbers of ranks"
                f" ({counts}). Start the same number on each host, or use --allreduce=ring or"
                " torus."
            )
        super().__init__(context, torus_grid=str(grid))


class HierarchicalMasters(EvenlySplitAllReduce):
    """Sum in groups, all-reduce between the groups' masters, broadcast in groups.

    The master of a group is its lowest rank. Jia et al. call the algorithm hierarchical all-reduce.
    Engines have no reduction to one rank, so the sum in a group is an all-reduce, of which only
    the master uses the result.

    Reference:
      Jia et al., arXiv 1807.11205.
    """

    def __init__(self, context: RankContext, *, torus_grid: str | None) -> None:
        """Creates a group for each row of the grid, and one for all masters.

        Args:
          context: The ranks.
          torus_grid: Grid as VxH, whose rows are the groups; None for `torus.default_grid`.

        Raises:
          ValueError: If the grid does not hold all ranks.
        """
        rows = torus.rows(context.hosts, _parse_grid(torus_grid, context.hosts))
        masters = sorted(min(row) for row in rows)
        self._collectives = context.collectives
        groups = _create_groups(context, [*rows, masters])
        members = _members_with(context.rank, rows)
        self._master = min(members)
        self._group = groups.get(members)
        is_master = context.rank == self._master
        self._masters = groups.get(tuple(masters)) if is_master else None
        self._has_several_masters = len(masters) > 1

    def allreduce_padded(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sends all elements twice in the groups and once between the masters."""
        total = vector
        if self._group is not None:
            total = self._collectives.allreduce(total, f"{name}_group", self._group)
        if self._masters is not None:
            total = self._collectives.allreduce(total, f"{name}_masters", self._masters)
        if self._group is not None and self._has_several_masters:
            total = self._collectives.broadcast(total, self._master, f"{name}_spread", self._group)
        return total


class SizeSwitched(AllReduceAlgorithm):
    """Sums small buckets by masters and large buckets by the ring.

    Reference:
      Jia et al., arXiv 1807.11205 (hybrid all-reduce).
    """

    def __init__(
        self, context: RankContext, *, torus_grid: str | None, size_switch_kb: int
    ) -> None:
        """Creates both algorithms.

        Args:
          context: The ranks.
          torus_grid: Grid as VxH, whose rows are the groups of masters.
          size_switch_kb: Size in KiB from which on a bucket is summed by the ring.
        """
        self._threshold_bytes = size_switch_kb * 1024
        self._masters = make_algorithm("masters", context, GridOptions(torus_grid))
        self._ring = make_algorithm("ring", context, AllReduceOptions())

    def for_size(self, num_bytes: int) -> AllReduceAlgorithm:
        return self._masters if num_bytes < self._threshold_bytes else self._ring

    def allreduce(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        num_bytes = vector.shape[0] * vector.dtype.size
        return self.for_size(num_bytes).allreduce(vector, name)


class Bfloat16AllReduce(EvenlySplitAllReduce):
    """Sums bfloat16 vectors by an exchange of their bits as 16-bit integers.

    Horovod's all-reduce does not support bfloat16. Each rank receives one chunk of the vector from
    every rank, adds these in FP32 in the order of ranks, rounds the sum, and all ranks gather the
    sums. That sends as many bytes as a ring, in the fewest steps, and rounds once after the sum
    instead of once per rank.
    """

    name = "exchange"

    def __init__(self, context: RankContext) -> None:
        """Needs no groups."""
        self._collectives = context.collectives
        self.num_chunks = len(context.hosts)

    def allreduce_padded(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sums by all-to-all, local sum and all-gather."""
        length = vector.shape[0]
        bits = self._collectives.alltoall(tf.bitcast(vector, tf.uint16), f"{name}_scatter")
        chunk_bits = tf.reshape(bits, [self.num_chunks, length // self.num_chunks])
        chunks = tf.bitcast(chunk_bits, tf.bfloat16)
        chunk_sum = tf.cast(tf.reduce_sum(tf.cast(chunks, tf.float32), 0), tf.bfloat16)
        gathered = self._collectives.allgather(tf.bitcast(chunk_sum, tf.uint16), f"{name}_gather")
        return tf.bitcast(tf.ensure_shape(gathered, vector.shape), tf.bfloat16)


def _parse_grid(text: str | None, hosts: Sequence[str]) -> torus.Grid:
    """Returns the grid written as `text`, or the default grid if it is None or empty.

    Raises:
      ValueError: If the grid does not hold all ranks.
    """
    return torus.parse_grid(text, len(hosts)) if text else torus.default_grid(hosts)


def _create_groups(
    context: RankContext, member_lists: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], typing.Any]:
    """Creates the groups of several ranks, and returns them by their members.

    A group of one rank would have nothing to send, so it is not created. All ranks create all
    groups in the same order, also those that they are not in, because engines need it.
    """
    groups = {}
    for members in member_lists:
        if len(members) > 1:
            groups[tuple(members)] = context.collectives.create_group(members)
    return groups


def _members_with(rank: int, member_lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the list of ranks that contains `rank`."""
    for members in member_lists:
        if rank in members:
            return tuple(members)
    raise ValueError(f"rank {rank} is in none of {member_lists}")
