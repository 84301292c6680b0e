"""Saves the run's state on rank 0, in the background."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.schedules.run_length import is_due


@dataclasses.dataclass(kw_only=True)
class CheckpointSaver:
    """Saves at epoch ends and best epochs, every N steps, when all ranks agree to, and when
    training ends early.

    Every rank calls it, because the statistics of batch normalization are merged first; rank 0
    alone has a `store`.

    Attributes:
      store: writes the files; None on ranks other than 0.
      state: the position of the run.
      variables: everything that training changes, by a stable name.
      describe: readies the variables and returns more metadata, JSON-ready; called on every rank,
      so it may gather.
      is_last: whether training ends when this many epochs are done.
      every_epochs: epochs between checkpoints; the end of training is always saved.
      every_steps: also save after this many steps.
      save_best: also save each epoch whose validation is the best so far.
      begins_at: fractional epochs done where training continues.
    """

    store: CheckpointStore | None
    state: RunState
    variables: Callable[[], Mapping[str, keras.Variable]]
    describe: Callable[[], Mapping[str, Any]]
    is_last: Callable[[float], bool]
    every_epochs: float
    every_steps: int | None = None
    save_best: bool = False
    begins_at: float = 0.0

    def __post_init__(self) -> None:
        self._saved = (self.state.step, self.state.recorded_at)
        # The position at the last checkpoint that `every_epochs` asked for.
        self._position = max(self.state.recorded_at, self.begins_at)
        self._seconds = 0.0

    def after_step(self, position: float, *, asked: bool = False) -> None:
        """Saves if that is due where this many fractional epochs are done, or `asked` for."""
        due = self.every_steps is not None and self.state.step % self.every_steps == 0
        inside = (
            self.state.cursor.epoch == self.state.finished_epochs
        )  # a checkpoint at its end waits for validation
        if due or asked or (inside and self._passes(position)):
            self.save()

    def _passes(self, position: float) -> bool:
        """Returns whether a checkpoint is due at fractional epochs where none was due before."""
        if not is_due(self.every_epochs, 0.0, self._position, position):
            return False
        self._position = position
        return True

    def after_epoch(self, done: float, top1: float | None = None) -> None:
        """Saves if that is due after this many epochs, whose validation top-1 is `top1`."""
        best = self.save_best and top1 is not None and self.state.best_epoch == done
        due = self._passes(done)
        if best or due or self.is_last(done) or self.state.stop:
            self.save(top1)

    def finish(self) -> None:
        """Saves what is not saved yet and waits for the disk."""
        self.save()
        if self.store is not None:
            self.store.wait()

    def save(self, top1: float | None = None) -> None:
        """Saves the state after the current step, unless it is saved already; `top1` is its
        validation accuracy.
        """
        position = (self.state.step, self.state.recorded_at)
        if self._saved == position:
            return
        self._saved = position
        began = time.perf_counter()
        description = self.describe()
        if self.store is not None:
            arrays = {
                name: np.array(variable.numpy()) for name, variable in self.variables().items()
            }
            own = {"state": self.state.to_dict(), "val_top1": None if top1 is None else float(top1)}
            self.store.save(self.state.step, arrays, {**description, **own})
        self._seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """Returns the time for which training has waited for checkpoints since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
