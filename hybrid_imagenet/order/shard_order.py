"""Computes an order of examples that reads from only a few shards at a time.

So the next shards can be fetched one by one, before they are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from hybrid_imagenet.order import sampling
from hybrid_imagenet.order.sampling import Cursor, Indices, SampleOrder

# Streams of the seed for the order of shards: this one for epoch 0, then downwards. Epochs of
# `SampleOrder` use the streams from 0 on, and `sampling.seeds` uses -2.
_FIRST_SHARD_STREAM = -3


@dataclasses.dataclass(frozen=True)
class _EpochPlan:
    """Holds the order of shards in one epoch and its division into w windows.

    Attributes:
      shards: int64 [s]; all shards, in the order of their windows.
      window_shards: int64 [w + 1]; index in `shards` at which each window begins, then s.
      window_positions: int64 [w + 1]; position in the epoch at which each window begins, then the
        number of examples.
    """

    shards: Indices
    window_shards: Indices
    window_positions: Indices


class ShardOrder(SampleOrder):
    """Takes `window` shards at a time and mixes all of their examples.

    Every epoch is a permutation of all examples that depends only on (seed, epoch), as in
    `SampleOrder`. The shards are permuted and divided into windows with nearly equal numbers of
    shards, and the examples of each window are permuted. If the window holds all shards, every
    order of examples is possible. With a smaller window the images of a batch come from `window`
    shards, which should hold images of all classes.

    Args:
      shard_sizes: Examples in each shard (int [s]); example numbers count through the shards.
      window: Shards that are mixed at a time, at least 1.
      seed: Non-negative seed of the order.

    Raises:
      ValueError: For an empty dataset.
    """

    def __init__(self, shard_sizes: Sequence[int] | Indices, window: int, seed: int = 0):
        sizes = np.asarray(shard_sizes, np.int64)
        super().__init__(int(sizes.sum()), seed)
        self.window = window
        self._sizes = sizes
        self._first_examples = np.cumsum(sizes) - sizes
        self._plan = functools.lru_cache(maxsize=4)(self._create_plan)

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Returns the example numbers at positions of an epoch's order, see `SampleOrder.at`."""
        plan = self._plan(epoch)
        epoch_seed = int(sampling.keys(self.seed, epoch)[0])
        windows = np.searchsorted(plan.window_positions, positions, "right") - 1
        examples = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            in_window = windows == window
            shards = plan.shards[plan.window_shards[window] : plan.window_shards[window + 1]]
            # Number the examples of the window through its shards, permute these numbers, and find
            # the shard of each.
            ends = np.cumsum(self._sizes[shards])
            starts = ends - self._sizes[shards]
            keys = sampling.keys(epoch_seed, int(window))
            window_positions = positions[in_window] - plan.window_positions[window]
            permuted = sampling.permute(window_positions, int(ends[-1]), keys)
            shard_indices = np.searchsorted(ends, permuted, "right")
            examples[in_window] = (
                self._first_examples[shards[shard_indices]] + permuted - starts[shard_indices]
            )
        return examples

    def shards_ahead(self, cursor: Cursor) -> tuple[int, ...]:
        """Returns the shards of the window at a cursor, then those of the next window."""
        plan = self._plan(cursor.epoch)
        window = int(np.searchsorted(plan.window_positions, cursor.offset, "right")) - 1
        num_windows = len(plan.window_shards) - 1
        # At the very end of an epoch the next example is in the first window of the next epoch.
        if window >= num_windows:
            return self.shards_ahead(Cursor(cursor.epoch + 1))
        begin = plan.window_shards[window]
        end = plan.window_shards[min(window + 2, num_windows)]
        shards = plan.shards[begin:end].tolist()
        if window + 1 == num_windows:
            next_plan = self._plan(cursor.epoch + 1)
            shards += next_plan.shards[: next_plan.window_shards[1]].tolist()
        return tuple(shards)

    def _create_plan(self, epoch: int) -> _EpochPlan:
        num_shards = len(self._sizes)
        keys = sampling.keys(self.seed, _FIRST_SHARD_STREAM - epoch)
        shards = sampling.permute(np.arange(num_shards, dtype=np.int64), num_shards, keys)
        num_windows = -(-num_shards // self.window)
        window_shards = np.arange(num_windows + 1, dtype=np.int64) * num_shards // num_windows
        shard_positions = np.concatenate([[0], np.cumsum(self._sizes[shards])])
        return _EpochPlan(shards, window_shards, shard_positions[window_shards])
