"""Saves the state of training on rank 0, in the background."""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.callbacks import callback_state
from hybrid_imagenet.callbacks.training_callback import TrainingCallback, prepare_to_save
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.schedules.run_length import is_due


class SaveCheckpoints(TrainingCallback, abc.ABC):
    """Saves at the end of epochs, every N steps, on request, and when training ends.

    Every rank has it, because all ranks prepare what is saved: for example, they merge the
    statistics of batch normalization. Rank 0 writes the file, in a thread. A checkpoint contains
    what the callbacks before this one do at the same event. `program_callbacks` has it last.

    A checkpoint contains the state of all callbacks: their variables, and the results of
    `state_dict`. The latter are set between `on_train_begin` of each callback, in which Keras's own
    reset theirs, and its first `on_epoch_begin`.

    The position of a checkpoint is the number of steps and of recorded epochs. No position is saved
    twice.
    """

    def __init__(
        self,
        *,
        every_epochs: float,
        every_steps: int | None = None,
        save_best: bool = False,
    ):
        """Stores when a checkpoint is due.

        Args:
          every_epochs: Epochs between checkpoints; the end of training is always saved.
          every_steps: Also save after this many steps.
          save_best: Also save each epoch whose validation is the best so far.
        """
        super().__init__()
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self._save_best = save_best
        self._store: CheckpointStore | None = None
        self._all_callbacks: Sequence[keras.callbacks.Callback] = ()
        # By name of the callback, until they are set.
        self._restored_states: dict[str, Mapping[str, Any]] = {}
        self._seconds = 0.0

    @abc.abstractmethod
    def trained_variables(self) -> Mapping[str, keras.Variable]:
        """Returns all variables that training changes, by a stable name."""

    @abc.abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Describes a checkpoint, JSON-ready; every rank calls it, so it may gather."""

    def start(
        self,
        store: CheckpointStore | None,
        all_callbacks: Sequence[keras.callbacks.Callback],
        restored_states: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Begins at the present position, which needs no checkpoint.

        Either the run is new, or it was restored from a checkpoint of this position.

        Args:
          store: Writes the files; None on ranks other than 0.
          all_callbacks: Callbacks of the run, whose state is saved too.
          restored_states: States of callbacks by name, from the checkpoint that was restored.

        Raises:
          UserError: On all ranks, if two callbacks save a variable with the same name.
        """
        with self.communicator.raise_on_all_ranks():
            # It checks the names now, and not in the first checkpoint.
            callback_state.saved_variables(all_callbacks)
        self._store = store
        self._all_callbacks = all_callbacks
        self._restored_states = dict(restored_states)
        state = self.run.state
        self._saved = (state.step, state.recorded_at)
        # Fractional epochs at the latest checkpoint that `every_epochs` has asked for.
        self._last_due = max(state.recorded_at, self.run.position)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the restored states of the callbacks that come before this one."""
        earlier = itertools.takewhile(lambda callback: callback is not self, self._all_callbacks)
        self._restore_callbacks(earlier)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the restored states of the other callbacks, in the first epoch."""
        self._restore_callbacks(self._all_callbacks)

    def _restore_callbacks(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        """Sets the states that have not been set yet.

        Args:
          callbacks: The first callbacks of the run, or all of them.
        """
        for name, callback in callback_state.stateful_callbacks(callbacks).items():
            if name in self._restored_states:
                self.restore_callback(callback, name, self._restored_states.pop(name))

    def restore_callback(
        self, callback: keras.callbacks.Callback, name: str, state: Mapping[str, Any]
    ) -> None:
        """Sets the restored state of a callback.

        Args:
          callback: Callback of the run.
          name: Name of the callback in the checkpoint.
          state: State of the callback in the checkpoint.
        """
        callback_state.set_state(callback, state)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if that is due within the epoch, or was requested."""
        state = self.run.state
        # The checkpoint at the end of an epoch is saved after the validation.
        is_inside_epoch = state.cursor.epoch == state.finished_epochs
        epochs_due = is_inside_epoch and self._claim_due_checkpoint(self.run.position)
        steps_due = self._every_steps is not None and state.step % self._every_steps == 0
        if epochs_due or steps_due or self.run.save_requested:
            self.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if that is due after the epochs that are done, `logs["epoch"]`."""
        assert logs is not None
        epochs_done = logs["epoch"]
        top1 = logs.get("val_top1")
        state = self.run.state
        is_best = self._save_best and top1 is not None and state.best_epoch == epochs_done
        epochs_due = self._claim_due_checkpoint(epochs_done)
        if epochs_due or is_best or self.run.is_at_end() or state.stop:
            self.save(top1)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.finish()

    def finish(self) -> None:
        """Saves what is not saved yet and waits for the disk; every rank calls it.

        Raises:
          UserError: On all ranks, if a checkpoint could not be written.
        """
        self.save()
        self.wait()

    def wait(self) -> None:
        """Waits for the disk; every rank calls it.

        Raises:
          UserError: On all ranks, if a checkpoint could not be written.
        """
        with self.communicator.raise_on_all_ranks():
            if self._store is not None:
                self._store.wait()

    def save(self, top1: float | None = None) -> None:
        """Saves the state after the current step, unless it is saved; every rank calls it.

        Args:
          top1: Its validation accuracy.

        Raises:
          UserError: On all ranks, if the checkpoint before could not be written.
        """
        state = self.run.state
        position = (state.step, state.recorded_at)
        if self._saved == position:
            return
        self._saved = position
        began = time.perf_counter()
        prepare_to_save(self._all_callbacks)
        description = self.describe()
        with self.communicator.raise_on_all_ranks():
            states = callback_state.states_of(self._all_callbacks)
            if self._store is not None:
                arrays = {
                    name: np.array(variable.numpy())
                    for name, variable in self.all_variables().items()
                }
                arrays |= self.extra_arrays()
                meta = {
                    **description,
                    "callbacks": states,
                    "state": state.to_dict(),
                    "val_top1": None if top1 is None else float(top1),
                }
                self._store.save(state.step, arrays, meta)
                job_lines.notify_checkpoint()
        self._seconds += time.perf_counter() - began

    def all_variables(self) -> dict[str, keras.Variable]:
        """Returns the variables that are saved, of training and of callbacks, by name."""
        return {**self.trained_variables(), **callback_state.saved_variables(self._all_callbacks)}

    def extra_arrays(self) -> dict[str, np.ndarray]:
        """Returns arrays that are saved but do not belong to variables, by name."""
        return {}

    def take_seconds(self) -> float:
        """Returns the seconds for which training has waited for checkpoints since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _claim_due_checkpoint(self, position: float) -> bool:
        """Returns whether `every_epochs` asks for a checkpoint at a position, only once for each.

        Call it at every event at which a checkpoint may be due, even if another reason to save is
        known already. Otherwise it asks again at the next event.

        Args:
          position: Fractional epochs done.
        """
        if not is_due(self._every_epochs, 0.0, self._last_due, position):
            return False
        self._last_due = position
        return True
