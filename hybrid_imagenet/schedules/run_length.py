"""Tells where a run ends, and how many updates that takes: the one place that knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from hybrid_imagenet.order.sampling import Cursor, SampleOrder

_ROUNDING = 1e-9  # of a multiple of a fraction of an epoch


@dataclasses.dataclass(frozen=True)
class Span:
    """The updates of one epoch, counted from 0, from a cursor on."""

    epoch: int
    begin: Cursor
    steps: int
    end: Cursor


@dataclasses.dataclass(frozen=True)
class RunLength:
    """Ends a run after `epochs` passes over the examples, or after `max_steps` updates if that is
    sooner.

    Both count from the beginning of the run. Training ends with the first update after which a
    (fractional) number of epochs is done, rounded to whole examples, so a run of some epochs makes
    the first updates of a longer one.

    Args:
      order: of the examples.
      epochs: above 0.
      max_steps: at least 1; None for no such limit.
    """

    order: SampleOrder
    epochs: float
    max_steps: int | None = None

    def reached(self, cursor: Cursor, step: int) -> bool:
        """Whether nothing is left to train after `step` updates, with `cursor` at the next
        example.
        """
        return self._examples_left(cursor) <= 0 or (
            self.max_steps is not None and step >= self.max_steps
        )

    def spans(
        self, batch: Callable[[int], int], cursor: Cursor | None = None, step: int = 0
    ) -> Iterator[Span]:
        """Yields the updates that are left, epoch by epoch; an update belongs to the epoch in which
        it begins.

        Args:
          batch: images of all ranks per update, by epoch.
          cursor: the next example; by default the first.
          step: updates done.
        """
        cursor = cursor or Cursor()
        while not self.reached(cursor, step):
            count = batch(cursor.epoch)
            steps = min(
                self.order.batches_in_epoch(count, cursor.offset),
                -(-self._examples_left(cursor) // count),
            )
            if self.max_steps is not None:
                steps = min(steps, self.max_steps - step)
            end = self.order.advance(cursor, count, steps) if steps else Cursor(cursor.epoch + 1, 0)
            yield Span(cursor.epoch, cursor, steps, end)
            cursor, step = end, step + steps

    def ends_at(self, batch: Callable[[int], int]) -> float:
        """The fractional epochs that are done when the run ends, at most `epochs`; `batch` as in
        `spans`.
        """
        *_, last = self.spans(batch)
        return min(self.order.position(last.end), self.epochs)

    def _examples_left(self, cursor: Cursor) -> int:
        total = max(round(self.epochs * self.order.num_examples), 1)
        return total - cursor.epoch * self.order.num_examples - cursor.offset


def passed(every: float, offset: float, low: float, high: float) -> bool:
    """Whether one of offset + every, offset + 2 every, ... lies above `low` and at or below `high`;
    all in epochs.
    """
    count = math.floor((high - offset) / every + _ROUNDING)
    return count >= 1 and offset + count * every > low + _ROUNDING
