"""Stops all ranks if training has become different on some of them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hybrid_imagenet import private_api
from hybrid_imagenet.callbacks.metric_average import SAME_DATA
from hybrid_imagenet.comm import process
from hybrid_imagenet.comm.agreement import check_agreement, digest
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer

_REMEDY = (
    "give callbacks that change weights, learning rate or stop_training to every rank, behind"
    " hybrid_imagenet.callbacks.default_callbacks(...), whose arguments and on_rank_zero are for"
    " those that write files"
)


# As --max_skipped_steps.
MAX_SKIPPED_STEPS = 50


class CompareRanks(keras.callbacks.Callback):
    """Ends training on all ranks when a callback or a step has changed some of them only.

    It compares at the start of each epoch and at the end of training. A rank that stops alone is
    found here, and not in a step, in which the other ranks would wait for it.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes how many updates were made.

        Raises:
          UserError: on all ranks, if they would train for themselves, or write the same files.
        """
        optimizer = self.model.optimizer
        alone = type(optimizer).__module__.startswith("keras.") or isinstance(
            optimizer, GroupedOptimizer
        )
        if alone and compiled_model.trains_as_keras(self.model) and process.communicator().size > 1:
            raise SharedError(
                "the optimizer sums no gradients over ranks: compile with"
                " hybrid_imagenet.DistributedOptimizer(...)"
            )
        _refuse_two_writers(private_api.running_callbacks())
        self._updates = {
            name: int(o.iterations) for name, o in compiled_model.distributed(self.model).items()
        }

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps this rank's loss of training, before `fit` resets the metrics for validation."""
        self._loss = self._own_loss()

    def _own_loss(self) -> float | None:
        tracker = private_api.loss_tracker(self.model)
        return None if tracker is None or not float(tracker.count) else float(tracker.result())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares; every rank calls it.

        Raises:
          UserError: on all ranks, with the ranks that differ and what differs.
        """
        self._loss = None
        self._compare(f"epoch {epoch + 1} begins")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Compares.

        Raises:
          UserError: on all ranks, with what differs, or if all steps were skipped.
        """
        self._compare("training ends")
        for name, optimizer in compiled_model.distributed(self.model).items():
            if (
                int(optimizer.loss_scale.skipped_in_a_row)
                and int(optimizer.iterations) == self._updates[name]
            ):
                raise self._skipped(name, optimizer, "all steps")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training that stands still.

        Raises:
          UserError: on all ranks, if the last `MAX_SKIPPED_STEPS` steps were skipped.
        """
        for name, optimizer in compiled_model.distributed(self.model).items():
            if optimizer.loss_scale.skipped_in_a_row >= MAX_SKIPPED_STEPS:
                raise self._skipped(name, optimizer, f"the last {MAX_SKIPPED_STEPS} steps or more")

    def _skipped(self, name: str, optimizer: DistributedOptimizer, steps: str) -> SharedError:
        """Returns the error for skipped steps, the likeliest cause first; every rank calls it."""
        own = self._own_loss() if self._loss is None else self._loss
        losses = process.communicator().allgather_object(own)
        # With NaN, which equals nothing, one cannot tell.
        same_data = len(losses) > 1 and own is not None and all(loss == own for loss in losses)
        remedies = ["look for NaN in the data", "scale large targets"]
        if not optimizer.loss_scale.dynamic and optimizer.loss_scale.initial > 1:
            remedies.append('set loss_scale="dynamic"')
        if optimizer.settings.compression != "none":
            remedies.append('set compression="none"')
        return SharedError(
            (f"{SAME_DATA}. " if same_data else "")
            + f"{name}: {steps} were skipped, because their gradients are not finite:"
            f" {', or '.join(remedies)}"
        )

    def _compare(self, next_: str) -> None:
        ranks = process.communicator()
        if ranks.size == 1:
            return
        own = {
            "what comes next": next_,
            "weights": digest(self.model.trainable_variables),
            **{
                f"{name}.learning_rate": np.float32(
                    optimizer.learning_rate
                )  # as precise as the step sees it
                for name, optimizer in compiled_model.optimizers(self.model).items()
                if hasattr(optimizer, "learning_rate")  # MultiOptimizer has none
            },
        }
        check_agreement(ranks, own, "after an epoch", _REMEDY)


_WRITE = {
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
"""Where callbacks of Keras write."""


def _refuse_two_writers(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    own = {
        f"{type(callback).__name__}({getattr(callback, attribute)!r})"
        for callback in callbacks
        for kind, attribute in _WRITE.items()
        if isinstance(callback, kind)
    }
    each = process.communicator().allgather_object(sorted(own))
    several = collections.Counter(writer for writers in each for writer in writers)
    for writer, count in several.items():
        if count > 1:
            raise SharedError(
                f"{writer} on {count} ranks would write the same files: give it to "
                "hybrid_imagenet.callbacks.default_callbacks(...), for rank 0 alone"
            )
