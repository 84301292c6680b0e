"""Logs how many training examples an epoch has used."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.training.inputs import TrainingData, all_replaced


class ExampleCount(TrainingCallback):
    """Logs `train_count`, `train_dropped` and `bad_records` of an epoch, and its batch sizes."""

    def __init__(self, data: TrainingData, state: RunState, communicator: Communicator):
        """Takes the data, the position of the run, and the ranks."""
        super().__init__(communicator)
        self._data = data
        self._state = state

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds up over ranks; every rank calls it.

        Raises:
          UserError: on all ranks, if they have found more than --max_bad_records bad records
            together.
        """
        assert logs is not None
        data = self._data
        gather = self.communicator.allgather_object
        ranks = gather([data.bad.reason_pairs(), max(data.source.labels_seen, default=-1)])
        data.bad.merge_from_ranks(bad for bad, _ in ranks)
        data.check_class_list(epoch, self._state.cursor, max(largest for _, largest in ranks))
        replaced = sum(number == epoch for number, _ in all_replaced(data, epoch, gather))
        logs |= data.facts(epoch)
        logs["train_count"] = data.images(epoch, self._state.cursor) - replaced
        logs["train_dropped"] = replaced
        logs["bad_records"] = len(data.bad.reasons)
