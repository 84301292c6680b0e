"""Saves the run's state on rank 0, in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.numerics.run_length import passed


class CheckpointSaver:
    """Saves at epoch ends and best epochs, every N steps, when all ranks agree to, and when training ends early.

    Every rank calls it, because the statistics of batch normalization are merged first; rank 0 alone has a `store`.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore | None,
        state: RunState,
        variables: Callable[[], Mapping[str, keras.Variable]],
        description: Callable[[], Mapping[str, Any]],
        synchronize: Callable[[], None],
        every_epochs: float,
        every_steps: int | None,
        is_last: Callable[[float], bool],
        save_best: bool = False,
        begins_at: float = 0.0,
    ):
        """Takes what to save and when.

        Args:
          store: writes the files; None on ranks other than 0.
          state: the position of the run.
          variables: everything that training changes, by a stable name.
          description: more metadata, JSON-ready; called on every rank, so it may gather.
          synchronize: merges BN statistics over ranks.
          every_epochs: epochs between checkpoints; the end of training is always saved.
          every_steps: also save after this many steps.
          is_last: whether training ends when this many epochs are done.
          save_best: also save each epoch whose validation is the best so far.
          begins_at: fractional epochs done where training continues.
        """
        self._store = store
        self._state = state
        self._variables = variables
        self._description = description
        self._synchronize = synchronize
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self._is_last = is_last
        self._save_best = save_best
        self._saved = (state.step, state.closed_at)
        self._position = max(state.closed_at, begins_at)  # at the last checkpoint that `every_epochs` asked for
        self._seconds = 0.0

    def after_step(self, position: float, *, asked: bool = False) -> None:
        """Saves if that is due where this many fractional epochs are done, or `asked` for."""
        due = bool(self._every_steps) and self._state.step % (self._every_steps or 1) == 0
        inside = self._state.cursor.epoch == self._state.finished_epochs  # a checkpoint at its end waits for validation
        if due or asked or (inside and self._passes(position)):
            self.save()

    def _passes(self, position: float) -> bool:
        """Returns whether a checkpoint is due at fractional epochs where none was due before."""
        if not passed(self._every_epochs, 0.0, self._position, position):
            return False
        self._position = position
        return True

    def after_epoch(self, done: float, top1: float | None = None) -> None:
        """Saves if that is due after this many epochs, whose validation top-1 is `top1`."""
        best = self._save_best and top1 is not None and self._state.best_epoch == done
        due = self._passes(done)
        if best or due or self._is_last(done) or self._state.stop:
            self.save(top1)

    def finish(self) -> None:
        """Saves what is not saved yet and waits for the disk."""
        self.save()
        if self._store is not None:
            self._store.wait()

    def save(self, top1: float | None = None) -> None:
        """Saves the state after the current step, unless it is saved already; `top1` is its validation accuracy."""
        position = (self._state.step, self._state.closed_at)
        if self._saved == position:
            return
        self._saved = position
        began = time.perf_counter()
        self._synchronize()
        description = self._description()
        if self._store is not None:
            arrays = {name: np.array(variable.numpy()) for name, variable in self._variables().items()}
            own = {"state": self._state.to_dict(), "val_top1": None if top1 is None else float(top1)}
            self._store.save(self._state.step, arrays, {**description, **own})
        self._seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Returns the time for which training has waited for checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
