"""Stops all ranks if training has become different on some of them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hybrid_imagenet import private_api
from hybrid_imagenet.callbacks.metric_average import SAME_DATA, MetricAverage, show_same_data
from hybrid_imagenet.callbacks.training_callback import TrainingCallback, print_to_stderr
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.comm.agreement import check_agreement, digest
from hybrid_imagenet.errors import EXIT_NUMERICS, NumericsError, SharedError, UserError
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.loss_scale import many_skipped_steps

# The default of --max_skipped_steps.
MAX_SKIPPED_STEPS = 50

# The attribute of each callback of Keras that names the file or directory to which it writes.
_OUTPUT_ATTRIBUTES = {
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
_REMEDY = (
    "pass callbacks that change weights, learning rate or stop_training to every rank, after"
    " hybrid_imagenet.callbacks.default_callbacks(...); only callbacks that write files belong in"
    " its arguments or in on_rank_zero"
)


class CompareRanks(TrainingCallback):
    """Ends training on all ranks if a callback or a step has changed only some of them.

    It is one of `default_callbacks()`. It compares at the start of each epoch and at the end of
    training. A rank that stops alone is found here, and not in a step, in which the other ranks
    would wait for it.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the ranks train together and write different files.

        Raises:
          UserError: On all ranks, if they would train separately or write the same files, or if a
            file would have weights that are not validated, or metrics of rank 0 alone.
        """
        optimizer = self.model.optimizer
        is_separate = type(optimizer).__module__.startswith("keras.") or isinstance(
            optimizer, GroupedOptimizer
        )
        trains_as_keras = compiled_model.trains_as_keras(self.model)
        if is_separate and trains_as_keras and self.communicator.size > 1:
            raise SharedError(
                "the optimizer sums no gradients over ranks: compile with"
                " hybrid_imagenet.DistributedOptimizer(...)"
            )
        callbacks = private_api.running_callbacks()
        _check_outputs(callbacks, self.communicator)
        with self.communicator.raise_on_all_ranks():
            _check_validated_weights_are_saved(callbacks)
        _check_averages_are_written(callbacks, self.communicator)
        self._loss: float | None = None
        self._updates_before: dict[str, int] | None = None
        self._reported_optimizers: set[str] = set()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stores this rank's training loss, before `fit` resets the metrics for validation."""
        self._loss = self._training_loss()

    def _training_loss(self) -> float | None:
        tracker = private_api.loss_tracker(self.model)
        if tracker is None or not float(tracker.count):
            return None
        return float(tracker.result())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares; every rank calls it.

        Raises:
          UserError: On all ranks, with the ranks that differ and what differs.
        """
        self._loss = None
        if self._updates_before is None:
            # Not in `on_train_begin`, where a later callback such as `Checkpoint` may restore the
            # optimizers.
            self._updates_before = {
                name: int(optimizer.iterations)
                for name, optimizer in compiled_model.distributed(self.model).items()
            }
        self._compare(f"epoch {epoch + 1} begins")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Compares; every rank calls it.

        Raises:
          UserError: On all ranks, with what differs, or if all steps were skipped.
        """
        self._compare("training ends")
        if self._updates_before is None:
            # A resumed run had no epoch left, so it has skipped no step.
            return
        for name, optimizer in compiled_model.distributed(self.model).items():
            is_skipping = int(optimizer.loss_scale.skipped_in_a_row) > 0
            if is_skipping and int(optimizer.iterations) == self._updates_before[name]:
                raise self._skipped_steps_error(name, optimizer, "all steps")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training that makes no progress, and reports training that often makes none.

        Raises:
          UserError: On all ranks, if the last `MAX_SKIPPED_STEPS` steps were skipped.
        """
        for name, optimizer in compiled_model.distributed(self.model).items():
            if optimizer.loss_scale.skipped_in_a_row >= MAX_SKIPPED_STEPS:
                steps = f"the last {MAX_SKIPPED_STEPS} steps or more"
                raise self._skipped_steps_error(name, optimizer, steps)
            skipped = int(optimizer.loss_scale.skipped_steps)
            warning = many_skipped_steps(skipped, skipped + int(optimizer.iterations))
            if warning and name not in self._reported_optimizers:
                self._reported_optimizers.add(name)
                if self.communicator.rank == 0:
                    print_to_stderr(f"warning: {name}: {warning}")

    def _skipped_steps_error(
        self, name: str, optimizer: DistributedOptimizer, steps: str
    ) -> NumericsError:
        """Returns the error for skipped steps, the likeliest cause first; every rank calls it."""
        loss = self._training_loss() if self._loss is None else self._loss
        losses = self.communicator.allgather_object(loss)
        remedies = ["look for NaN in the data", "scale large targets"]
        if not optimizer.loss_scale.dynamic and optimizer.loss_scale.initial > 1:
            remedies.append('set loss_scale="dynamic"')
        if optimizer.reducer.wire_dtype != "float32":
            remedies.append('set compression="none"')
        likely_cause = f"{SAME_DATA}. " if show_same_data(losses) else ""
        return NumericsError(
            f"{likely_cause}{name}: {steps} were skipped, because their gradients are not finite:"
            f" {', or '.join(remedies)}"
        )

    def _compare(self, next_event: str) -> None:
        if self.communicator.size == 1:
            return
        values: dict[str, Any] = {
            "what comes next": next_event,
            "weights": digest(self.model.trainable_variables),
        }
        for name, optimizer in compiled_model.optimizers(self.model).items():
            # keras.optimizers.MultiOptimizer has no learning rate.
            if hasattr(optimizer, "learning_rate"):
                # Rounded as in the step.
                values[f"{name}.learning_rate"] = np.float32(optimizer.learning_rate)
        check_agreement(self.communicator, values, "after an epoch", _REMEDY, EXIT_NUMERICS)


def _check_validated_weights_are_saved(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises UserError if `ModelCheckpoint` comes before averages replace the weights."""
    saves = False
    for callback in callbacks:
        saves |= isinstance(callback, keras.callbacks.ModelCheckpoint)
        is_swap = isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch
        if saves and is_swap:
            raise UserError(
                "ModelCheckpoint comes before SwapEMAWeights(swap_on_epoch=True), so it would save"
                " other weights than those that were validated. Pass"
                " callbacks=[*default_callbacks(), SwapEMAWeights(swap_on_epoch=True),"
                " *hybrid_imagenet.callbacks.on_rank_zero(ModelCheckpoint(...))]."
            )


def _check_averages_are_written(
    callbacks: Sequence[keras.callbacks.Callback], communicator: Communicator
) -> None:
    """Raises SharedError if only rank 0 writes a file before metrics and statistics are averaged.

    A callback that all ranks have there may write what each of them has.
    """
    averages = [isinstance(callback, MetricAverage) for callback in callbacks]
    first = averages.index(True) if any(averages) else 0
    writers = {
        type(callback).__name__
        for callback in callbacks[:first]
        if isinstance(callback, tuple(_OUTPUT_ATTRIBUTES))
    }
    writers_by_rank = communicator.allgather_object(sorted(writers))
    for name in writers_by_rank[0]:
        if not all(name in row for row in writers_by_rank):
            raise SharedError(
                f"{name} comes before default_callbacks(), so it would write the metrics and the"
                " statistics of rank 0 instead of those of all ranks. Pass callbacks="
                f"[*hybrid_imagenet.callbacks.default_callbacks({name}(...)), ...]."
            )


def _check_outputs(
    callbacks: Sequence[keras.callbacks.Callback], communicator: Communicator
) -> None:
    """Raises SharedError if callbacks of several ranks would write the same files."""
    writers = set()
    for callback in callbacks:
        for kind, attribute in _OUTPUT_ATTRIBUTES.items():
            if isinstance(callback, kind):
                writers.add(f"{type(callback).__name__}({getattr(callback, attribute)!r})")
    writers_by_rank = communicator.allgather_object(sorted(writers))
    counts = collections.Counter(writer for row in writers_by_rank for writer in row)
    for writer, count in counts.items():
        if count > 1:
            raise SharedError(
                f"{writer} on {count} ranks would write the same files: pass it to"
                " hybrid_imagenet.callbacks.default_callbacks(...), which uses it on rank 0 only"
            )
