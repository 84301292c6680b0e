"""Computes where a run ends and how many updates that takes; no other module decides it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from hybrid_imagenet.order.sampling import Cursor, SampleOrder

# Tolerance in comparisons of fractional epochs.
_EPOCH_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Span:
    """Holds the updates of one epoch, from a cursor on.

    Attributes:
      epoch: Counted from 0.
      begin: Next example before the first update.
      steps: Number of updates.
      end: Next example after the last update.
    """

    epoch: int
    begin: Cursor
    steps: int
    end: Cursor


@dataclasses.dataclass(frozen=True)
class RunLength:
    """Ends a run after a number of epochs or updates, whichever is reached first.

    Both are counted from the beginning of the run. Training ends with the first update after which
    the (fractional) number of epochs is done, rounded to whole examples. So a short run makes the
    first updates of a longer one.

    Attributes:
      order: Order of the examples.
      epochs: Passes over the examples, above 0.
      max_steps: Updates, at least 1; None for no limit.
    """

    order: SampleOrder
    epochs: float
    max_steps: int | None = None

    def is_over(self, cursor: Cursor, step: int) -> bool:
        """Returns whether training is complete.

        Args:
          cursor: The next example.
          step: Updates done.
        """
        if self.max_steps is not None and step >= self.max_steps:
            return True
        return self._remaining_examples(cursor) <= 0

    def spans(
        self, global_batch: Callable[[int], int], cursor: Cursor | None = None, step: int = 0
    ) -> Iterator[Span]:
        """Yields the remaining updates epoch by epoch.

        An update belongs to the epoch in which it begins.

        Args:
          global_batch: Images of all ranks per update, by epoch.
          cursor: The next example; by default the first.
          step: Updates done.
        """
        cursor = cursor or Cursor()
        while not self.is_over(cursor, step):
            count = global_batch(cursor.epoch)
            steps = min(
                self.order.batches_in_epoch(count, cursor.offset),
                -(-self._remaining_examples(cursor) // count),
            )
            if self.max_steps is not None:
                steps = min(steps, self.max_steps - step)
            end = self.order.advance(cursor, count, steps)
            yield Span(cursor.epoch, cursor, steps, end)
            cursor = end
            step += steps

    def end_position(self, global_batch: Callable[[int], int]) -> float:
        """Returns the fractional epochs that are done when the run ends, at most `epochs`.

        Args:
          global_batch: Images of all ranks per update, by epoch.
        """
        *_, last = self.spans(global_batch)
        return min(self.order.position(last.end), self.epochs)

    def _remaining_examples(self, cursor: Cursor) -> int:
        total = max(round(self.epochs * self.order.num_examples), 1)
        return total - cursor.epoch * self.order.num_examples - cursor.offset


def is_due(every: float, offset: float, after: float, until: float) -> bool:
    """Returns whether a periodic event falls into (after, until]; all values are in epochs.

    Args:
      every: Period.
      offset: The events are at offset + every, offset + 2 every, and so on.
      after: An event at exactly this position does not count.
      until: An event at exactly this position counts.
    """
    count = math.floor((until - offset) / every + _EPOCH_TOLERANCE)
    return count >= 1 and offset + count * every > after + _EPOCH_TOLERANCE
