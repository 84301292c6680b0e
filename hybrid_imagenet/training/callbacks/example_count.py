"""Counts the examples of each epoch over all ranks, and tells when some were neither used nor dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.inputs import TrainingData


class ExampleCount(keras.callbacks.Callback):
    """Adds `train_count`, `train_dropped` and `bad_records` to epoch records.

    What damaged files have lost is missing from every epoch, and so counts as dropped in each.
    """

    def __init__(
        self, data: TrainingData, state: RunState, gather: Callable[[Any], list[Any]], announce: Callable[[str], None]
    ):
        """Takes the data, the run's position, what gathers an object of every rank, and what shows a line once."""
        super().__init__()
        self._data = data
        self._state = state
        self._gather = gather
        self._announce = announce

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds up over ranks; every rank calls it.

        Raises:
          UserError: on all ranks, if they have found more than --max_bad_records bad records together.
        """
        data = self._data
        own = data.count(epoch)
        ranks = self._gather([own.used, own.dropped, data.bad.pairs()])
        used, dropped, known = zip(*ranks, strict=True)
        data.bad.share(known)
        expected = data.expected(epoch, self._state.cursor)
        if expected is not None and expected != sum(used) + sum(dropped):
            self._announce(
                f"error: epoch {epoch + 1}: {expected} images in, but {sum(used)} used and {sum(dropped)} dropped: "
                "some were not counted, or counted twice; please report this"
            )
        if logs is not None:
            logs["train_count"] = sum(used)
            logs["train_dropped"] = sum(dropped) + data.source.lost
            logs["bad_records"] = data.bad.count


def gathered(data: TrainingData, epoch: int, gather: Callable[[Any], list[Any]]) -> dict[str, list[int]]:
    """Returns the counts of an epoch and later ones over all ranks, for a checkpoint: [used, dropped] by epoch."""
    total: dict[str, list[int]] = {}
    for counts in gather({str(number): [c.used, c.dropped] for number, c in data.counts_since(epoch).items()}):
        for number, (used, dropped) in counts.items():
            before = total.get(number, [0, 0])
            total[number] = [before[0] + used, before[1] + dropped]
    return total
