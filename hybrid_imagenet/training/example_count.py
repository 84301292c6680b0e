"""Counts the examples of each epoch that all ranks have used, and those that others replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.inputs import TrainingData


class ExampleCount:
    """Gives `train_count`, `train_dropped` and `bad_records` of an epoch."""

    def __init__(self, data: TrainingData, state: RunState, gather: Callable[[Any], list[Any]]):
        """Takes the data, the run's position, and what gathers an object of every rank."""
        self._data = data
        self._state = state
        self._gather = gather

    def __call__(self, epoch: int) -> dict[str, int]:
        """Adds up over ranks; every rank calls it.

        Raises:
          UserError: on all ranks, if they have found more than --max_bad_records bad records together.
        """
        data = self._data
        ranks = self._gather([data.bad.pairs(), max(data.source.labels_seen, default=-1)])
        data.bad.share(bad for bad, _ in ranks)
        data.check_class_list(epoch, self._state.cursor, max(largest for _, largest in ranks))
        replaced = sum(number == epoch for number, _ in all_replaced(data, epoch, self._gather))
        return {
            "train_count": data.images(epoch, self._state.cursor) - replaced,
            "train_dropped": replaced,
            "bad_records": len(data.bad.known),
        }


def all_replaced(data: TrainingData, epoch: int, gather: Callable[[Any], list[Any]]) -> list[list[int]]:
    """Returns [epoch, example] of those that others replaced, in this epoch and later ones, each once over all ranks.

    They are examples, not counts: an example that is read again after a restart, on whatever rank, counts once.
    """
    pairs = {(number, example) for part in gather(data.replaced(epoch)) for number, example in part}
    return [list(pair) for pair in sorted(pairs)]
