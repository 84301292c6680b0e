"""Begins training anew from a checkpoint when it has diverged."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
from collections.abc import Callable
from typing import TypeVar

import keras

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import NumericsError

_Result = TypeVar("_Result")


class DivergedError(NumericsError):
    """Training has diverged; all ranks raise it at the same step.

    Attributes:
      state: where the run stood.
      loss: the loss over all ranks that is too high or not finite.
      run_dir: the directory of the run on rank 0; set on its way to who goes back.
    """

    def __init__(self, message: str, state: RunState, loss: float):
        """Keeps what a rollback needs to know."""
        super().__init__(message)
        self.state = state
        self.loss = loss
        self.run_dir: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A return to an earlier step: its reason and how far it goes.

    Attributes:
      run_dir: the directory of the run; known on rank 0.
      step: where training was found to have diverged.
      loss: the loss there.
      good_step: the newest step whose weights were found good.
      count: rollbacks of the run, this one included.
      seconds: wall time of the run so far.
    """

    run_dir: pathlib.Path | None
    step: int
    loss: float
    good_step: int
    count: int
    seconds: float


def run(session: Callable[[Rollback | None], _Result], rollbacks: int) -> _Result:
    """Calls `session` until it ends by itself; begins it anew, with how far to go back, when training has diverged.

    Args:
      session: restores, trains and lets go of the run's files when it is interrupted. All ranks raise the same
        `DivergedError` at the same step, so that they begin anew together.
      rollbacks: how often the run may go back to a checkpoint.

    Raises:
      DivergedError: if it has diverged once more.
    """
    rollback: Rollback | None = None
    while True:
        try:
            return session(rollback)
        except DivergedError as error:
            state = error.state
            if state.rollbacks >= rollbacks:
                raise
            rollback = Rollback(
                error.run_dir, state.step, error.loss, state.good_step, state.rollbacks + 1, state.seconds
            )
        # Not inside of the handler: the error would hold the old session's network in memory.
        gc.collect()
        keras.utils.clear_session()
