"""Logs how many training examples an epoch has used."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.training.inputs import TrainingData, replaced_on_all_ranks


class ExampleCount(TrainingCallback):
    """Logs `train_count`, `train_dropped` and `bad_records` of an epoch, and its batch sizes."""

    def __init__(self, data: TrainingData):
        """Takes the training data of this rank."""
        super().__init__()
        self._data = data

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds up over ranks; every rank calls it.

        Raises:
          UserError: On all ranks, if they have found more than --max_bad_records bad records
            together.
        """
        assert logs is not None
        data = self._data
        gather = self.communicator.allgather_object
        largest_label = max(data.source.labels_seen, default=-1)
        rows = gather([data.bad_records.reason_pairs(), largest_label])
        data.bad_records.merge_from_ranks(reasons for reasons, _ in rows)
        data.check_class_list(epoch, self.run.state.cursor, max(label for _, label in rows))
        replaced = replaced_on_all_ranks(data, epoch, gather)
        num_replaced = sum(number == epoch for number, _ in replaced)
        logs |= data.recorded_sizes(epoch)
        logs["train_count"] = data.num_examples_read(epoch, self.run.state.cursor) - num_replaced
        logs["train_dropped"] = num_replaced
        logs["bad_records"] = len(data.bad_records.reasons)
