"""Hands the schedule's values of each step to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.optimizers.base import GroupedOptimizer

Schedule = Callable[[float, float, int], Mapping[str, float]]


class Hyperparameters:
    """Sets learning rate, momentum, phase and the AdaBound bounds before every step.

    The schedule is a function of the fractional epochs at the start and the end of the step, which follow from the
    images processed; so it holds when the batch or the number of ranks changes.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizer: GroupedOptimizer,
        state: RunState,
        relative_step: Callable[[Mapping[str, float]], float | None] = lambda values: None,
    ):
        """Keeps the values in `state.hyper`, so that a run resumed between an epoch's last step and its end has them.

        Args:
          schedule: of (start, end, global_batch).
          optimizer: takes its values in one assignment; built.
          state: of the run.
          relative_step: LARS's relative step under such values, None where LARS does not run; goes into the records.
        """
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = state
        self._relative_step = relative_step

    def set(self, start: float, end: float, global_batch: int) -> None:
        """Sets the values for the step that covers these fractional epochs."""
        self._state.hyper = dict(self._schedule(start, end, global_batch))
        self._optimizer.hyper.assign(self._state.hyper)

    def values(self) -> dict[str, float]:
        """The values of the last step, for a record."""
        step = self._relative_step(self._state.hyper) if self._state.hyper else None
        return self._state.hyper if step is None else {**self._state.hyper, "relative_step": step}
