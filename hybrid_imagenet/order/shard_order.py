"""Computes an order of examples that keeps to a few shards at a time, so that shards can be fetched
one by one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from hybrid_imagenet.order import sampling
from hybrid_imagenet.order.sampling import Cursor, Indices, SampleOrder


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The order of shards in one epoch.

    Attributes:
      shards: int64 [s]; all shards, in the order in which their windows come.
      first: int64 [w + 1]; the place in `shards` where each window begins, and their number.
      begin: int64 [w + 1]; the position in the epoch at which each window begins, and the number of
        examples.
    """

    shards: Indices
    first: Indices
    begin: Indices


class ShardOrder(SampleOrder):
    """Each epoch takes the shards in a new order, `window` of them at a time, and mixes all
    examples of a window.

    Every epoch is a permutation of all examples that is computed from (seed, epoch) alone, as that
    of `SampleOrder`: the shards are permuted and divided into windows, as equal in their number of
    shards as possible, and the examples of each window are permuted. With a window of all shards
    every order of examples is possible; with a smaller one the images of a batch come from `window`
    shards only, which should hold images of all classes.

    Args:
      shard_sizes: examples in each shard (int [s]); example numbers count through the shards.
      window: shards that are mixed at a time, at least 1.
      seed: non-negative seed of the order.
      remainder: as in `SampleOrder`.

    Raises:
      ValueError: for an empty data set, a window below 1 or an unknown remainder policy.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int] | Indices,
        window: int,
        seed: int = 0,
        remainder: str = "wrap",
    ):
        sizes = np.asarray(shard_sizes, np.int64)
        super().__init__(int(sizes.sum()), seed, remainder)
        self.window = window
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        self._plan = functools.lru_cache(maxsize=4)(self._new_plan)

    def at(self, epoch: int, positions: Indices) -> Indices:
        """The example numbers at some positions (int64 [k], each in [0, num_examples)) of an
        epoch's order.
        """
        plan, seed = self._plan(epoch), int(sampling.keys(self.seed, epoch)[0])
        windows = np.searchsorted(plan.begin, positions, "right") - 1
        examples = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            here = windows == window
            shards = plan.shards[plan.first[window] : plan.first[window + 1]]
            ends = np.cumsum(self._sizes[shards])
            keys = sampling.keys(seed, int(window))
            mixed = sampling.permute(positions[here] - plan.begin[window], int(ends[-1]), keys)
            place = np.searchsorted(ends, mixed, "right")
            examples[here] = (
                self._starts[shards[place]] + mixed - (ends - self._sizes[shards])[place]
            )
        return examples

    def shards_ahead(self, cursor: Cursor) -> tuple[int, ...]:
        """The shards of the window at a cursor, then those of the next one, in the order in which
        windows come.
        """
        plan = self._plan(cursor.epoch)
        window = int(np.searchsorted(plan.begin, cursor.offset, "right")) - 1
        last = len(plan.first) - 1
        if window >= last:  # at the very end of the epoch
            return self.shards_ahead(Cursor(cursor.epoch + 1))
        now = plan.shards[plan.first[window] : plan.first[min(window + 2, last)]]
        if window + 1 < last:
            return tuple(now.tolist())
        following = self._plan(cursor.epoch + 1)
        return (*now.tolist(), *following.shards[: following.first[1]].tolist())

    def _new_plan(self, epoch: int) -> _Plan:
        count = len(self._sizes)
        # Streams of this seed that neither an epoch of `SampleOrder` nor a window uses: negative
        # ones below -2.
        shards = sampling.permute(
            np.arange(count, dtype=np.int64), count, sampling.keys(self.seed, -3 - epoch)
        )
        parts = -(-count // self.window)
        first = np.arange(parts + 1, dtype=np.int64) * count // parts
        return _Plan(shards, first, np.concatenate([[0], np.cumsum(self._sizes[shards])])[first])
