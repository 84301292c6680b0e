"""Sums buckets of gradients over all ranks, by algorithms made of collective operations among
groups of ranks.

Each takes the vector of a bucket and returns its sum. The ring is the engine's own all-reduce; the
others pad the vector so that it can be cut evenly.

ring           one all-reduce over all ranks
hierarchical   torus with one row per host (the scheme that Horovod and NCCL call hierarchical)
masters        sum in each group, all-reduce between the first ranks of the groups, broadcast in
each group (Jia et al.) size_switched  masters for small buckets, the ring for large ones (Jia et
al.) torus          reduce-scatter in rows, all-reduce in columns, all-gather in rows (Mikami et
al.)
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
from hybrid_imagenet.comm.settings import ALGORITHMS, Settings
from hybrid_imagenet.errors import UserError


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks among which an algorithm works: this one's number, the host of every rank, the
    engine's operations.
    """

    rank: int
    hosts: Sequence[str]
    collectives: Collectives


def _grid(text: str | None, hosts: Sequence[str]) -> torus.Grid:
    """Returns the grid written as `text`, or the default one; raises ValueError if it does not hold
    all ranks.
    """
    return torus.parse_grid(text, len(hosts)) if text else torus.default_grid(hosts)


class Algorithm(abc.ABC):
    """A way to sum a vector over all ranks.

    A constructor takes `Ranks` and the options that `comm.settings.ALGORITHMS` declares for it, by
    name.
    """

    name = ""  # in `ALGORITHMS`; `make` sets it

    @classmethod
    def rows_are_hosts(cls, hosts: Sequence[str], **options: typing.Any) -> bool:
        """Returns whether it is a torus with one row per host, which Horovod itself has for
        NCCL.
        """
        del hosts, options
        return False

    def for_size(self, size: int) -> Algorithm:
        """Returns the algorithm for a bucket of `size` bytes."""
        del size
        return self

    @abc.abstractmethod
    def sum(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum over ranks of a tensor of shape [n], in its type. `name` pairs the ranks'
        operations.
        """


def make(name: str, ranks: Ranks, **options: typing.Any) -> Algorithm:
    """Returns the algorithm that `--allreduce=name` stands for, with its options.

    Raises:
      UserError: if the algorithm needs hosts with equal numbers of ranks.
      ValueError: if a grid does not hold all ranks.
    """
    known = ALGORITHMS[name]
    made: Algorithm = pkgutil.resolve_name(known.constructor)(
        ranks, **vars(known.options(**options))
    )
    made.name = name
    return made


class Ring(Algorithm):
    """The engine's all-reduce over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._do = ranks.collectives

    def sum(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        return self._do.allreduce_apart(flat, name)


class Cut(Algorithm):
    """An algorithm that cuts the vector into `parts` of one length."""

    parts = 1

    def sum(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Pads the vector, sums, and cuts the padding off."""
        pad = -flat.shape[0] % self.parts
        if not pad:
            return self.sum_padded(flat, name)
        return self.sum_padded(tf.pad(flat, [[0, pad]]), name)[: flat.shape[0]]

    @abc.abstractmethod
    def sum_padded(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum over ranks of a tensor of shape [n], n a multiple of `parts`."""


def _make_sets(ranks: Ranks, groups: Sequence[Sequence[int]]) -> dict[tuple[int, ...], typing.Any]:
    """Returns the sets of several ranks by their members; all ranks make all sets, in the same
    order.
    """
    return {
        tuple(members): ranks.collectives.group(members) for members in groups if len(members) > 1
    }


class Torus(Cut):
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows."""

    @classmethod
    def rows_are_hosts(cls, hosts: Sequence[str], **options: typing.Any) -> bool:
        """Returns whether the grid is that of the hosts."""
        return _grid(options.get("torus_grid"), hosts) == torus.host_grid(hosts)

    def __init__(self, ranks: Ranks, *, torus_grid: str | None) -> None:
        """Makes the sets of ranks.

        Raises:
          ValueError: if the grid does not hold all ranks.
        """
        rows = torus.rows(ranks.hosts, _grid(torus_grid, ranks.hosts))
        columns = torus.columns(rows)
        self.parts = len(columns)
        self._do = ranks.collectives
        made = _make_sets(ranks, [*rows, *columns])
        self._row = next(made.get(tuple(row)) for row in rows if ranks.rank in row)
        self._column = next(made.get(tuple(column)) for column in columns if ranks.rank in column)

    def sum_padded(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Sends each element twice through the row and, divided by the row's length, through the
        column.
        """
        if self._row is None and self._column is None:
            return flat
        part = flat
        if self._row is not None:
            part = self._do.reducescatter(part, f"{name}_scatter", self._row)
        if self._column is not None:
            part = self._do.allreduce(part, f"{name}_column", self._column)
        if self._row is not None:
            part = self._do.allgather(part, f"{name}_gather", self._row)
        return tf.ensure_shape(part, flat.shape)


class Hierarchical(Torus):
    """A torus with one row per host."""

    @classmethod
    def rows_are_hosts(cls, hosts: Sequence[str], **options: typing.Any) -> bool:
        """Returns whether the hosts have equally many ranks."""
        return torus.host_grid(hosts) is not None

    def __init__(self, ranks: Ranks) -> None:
        """Makes the sets of ranks.

        Raises:
          UserError: if the hosts hold different numbers of ranks.
        """
        grid = torus.host_grid(ranks.hosts)
        if grid is None:
            counts = ", ".join(
                f"{host} {count}" for host, count in collections.Counter(ranks.hosts).items()
            )
            raise UserError(
                f"--allreduce=hierarchical: the hosts hold different numbers of ranks ({counts}):"
                " start as many on each, or use --allreduce=ring or torus"
            )
        super().__init__(ranks, torus_grid=str(grid))


class Masters(Cut):
    """Sum in groups, all-reduce between the groups' masters (their lowest ranks), broadcast in
    groups.

    Engines have no reduction to one rank. The sum in a group is an all-reduce, whose result only
    the master uses.
    """

    def __init__(self, ranks: Ranks, *, torus_grid: str | None) -> None:
        """Makes the sets of ranks.

        Raises:
          ValueError: if the grid does not hold all ranks.
        """
        groups = torus.rows(ranks.hosts, _grid(torus_grid, ranks.hosts))
        masters = sorted(min(group) for group in groups)
        self._do = ranks.collectives
        made = _make_sets(ranks, [*groups, masters])
        group = next(g for g in groups if ranks.rank in g)
        self._root = min(group)
        self._group = made.get(tuple(group))
        self._masters = made.get(tuple(masters)) if ranks.rank == self._root else None
        self._several = len(masters) > 1

    def sum_padded(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Sends all elements through the groups twice and between the masters once."""
        total = flat
        if self._group is not None:
            total = self._do.allreduce(total, f"{name}_group", self._group)
        if self._masters is not None:
            total = self._do.allreduce(total, f"{name}_masters", self._masters)
        if self._group is not None and self._several:
            total = self._do.broadcast(total, self._root, f"{name}_spread", self._group)
        return total


class SizeSwitched(Algorithm):
    """Sums small buckets by masters and large ones by the ring (Jia et al.)."""

    def __init__(self, ranks: Ranks, *, torus_grid: str | None, size_switch_kb: int) -> None:
        self._threshold = size_switch_kb * 1024
        self._small = make("masters", ranks, torus_grid=torus_grid)
        self._large = make("ring", ranks)

    def for_size(self, size: int) -> Algorithm:
        return self._small if size < self._threshold else self._large

    def sum(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        return self.for_size(flat.shape[0] * flat.dtype.size).sum(flat, name)


class SixteenBitExchange(Cut):
    """The sum of bfloat16 tensors, which Horovod's all-reduce refuses, carried as 16-bit integers.

    Each rank receives its share of everyone's bits, adds them in FP32 in the order of ranks, and
    the rounded shares are gathered: the traffic of a ring in the fewest steps, with one rounding
    after the sum instead of one per rank.
    """

    name = "exchange"

    def __init__(self, ranks: Ranks) -> None:
        self._do, self.parts = ranks.collectives, len(ranks.hosts)

    def sum_padded(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Sums by all-to-all, local sum and all-gather."""
        bits = self._do.alltoall(tf.bitcast(flat, tf.uint16), f"{name}_scatter")
        shares = tf.bitcast(
            tf.reshape(bits, [self.parts, flat.shape[0] // self.parts]), tf.bfloat16
        )
        share = tf.cast(tf.reduce_sum(tf.cast(shares, tf.float32), 0), tf.bfloat16)
        gathered = self._do.allgather(tf.bitcast(share, tf.uint16), f"{name}_gather")
        return tf.bitcast(tf.ensure_shape(gathered, flat.shape), tf.bfloat16)


class Selector:
    """Makes the algorithm that the settings ask for, and gives each bucket its own. The same on all
    ranks.
    """

    def __init__(self, ranks: Ranks, settings: Settings, *, engine_does_it: bool = False) -> None:
        """Makes the sets of ranks.

        Args:
          ranks: all of them; one object of collectives per process, as Horovod refuses the same set
          twice.
          settings: the algorithm with its options.
          engine_does_it: the engine's own all-reduce has been set to the algorithm, so that nothing
            need be composed.

        Raises:
          UserError: if the algorithm needs hosts with equal numbers of ranks.
          ValueError: if the grid does not hold all ranks.
        """
        self._exchange = SixteenBitExchange(ranks)
        self._chosen: Algorithm = (
            Ring(ranks) if engine_does_it else make(settings.allreduce, ranks, **settings.options)
        )
        self._chosen.name = settings.allreduce

    def of(self, bucket: Bucket) -> Algorithm:
        """Returns what sums a bucket."""
        return self._exchange if bucket.wire == "bfloat16" else self._chosen.for_size(bucket.bytes)
