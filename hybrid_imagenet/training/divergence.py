"""Judges the loss of every step on the device, and ends training that has diverged on all ranks at
the same step.

So divergence is seen without a fetch per step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import NumericsError
from hybrid_imagenet.training.late_copies import LateCopies

_REMEDY = (
    "training has diverged; lower the learning rate (--lr, or --lars_eta) or lengthen the warmup,"
    " and start again"
)


FACTOR = 100.0
"""A loss above this many times that of guesses has diverged: ln(classes), or `summed` over classes
ln 2 for each.
"""


def highest_loss(classes: int, *, summed: bool = False) -> float:
    """Returns the highest loss in nats that is not divergence."""
    return FACTOR * (classes * math.log(2) if summed else math.log(max(classes, 2)))


class LossAlarm:
    """Notes the first step of which a micro-batch has a mean loss that is not finite or too high.

    `variable` is one float64 vector on the device: optimizer steps done, the first such step (from
    1; 0 for none), its loss.
    """

    def __init__(self, highest: float):
        """`highest` is the loss in nats above which it goes off."""
        self.highest = highest
        self.variable = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="loss_alarm")
        self._judged = xla.compile_on_gpu(self._after)

    def judge(self, losses: tf.Tensor) -> None:
        """Takes the losses of this rank's micro-batch, float32 [b], before the step that they
        belong to is done.
        """
        self.variable.assign(self._judged(losses, self.variable.read_value()))

    def _after(self, losses: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        loss = tf.cast(tf.reduce_mean(losses), tf.float64)
        done, first, _ = tf.unstack(before)
        bad = tf.logical_not(loss <= self.highest)  # a NaN is not
        fresh = tf.logical_and(bad, tf.equal(first, 0.0))
        return tf.where(fresh, tf.stack([done, done + 1.0, loss]), before)

    def advance(self) -> None:
        """Counts a step."""
        self.variable.assign_add([1.0, 0.0, 0.0])

    def read(self, values: npt.ArrayLike | None = None) -> tuple[int, float] | None:
        """Returns the first bad step, counted from 1, and its loss; waits for the device, unless
        given the values.
        """
        _, first, loss = self.variable.numpy() if values is None else np.asarray(values)
        return (int(first), float(loss)) if first else None


class DivergedError(NumericsError):
    """Training has diverged; all ranks raise it at the same step.

    Attributes:
      step: the first one that had diverged.
      loss: its loss over all ranks, which is too high or not finite.
    """

    def __init__(self, message: str, step: int, loss: float):
        super().__init__(message)
        self.step, self.loss = step, loss


@dataclasses.dataclass
class DivergenceGuard:
    """Reads the loss alarm of every rank.

    The trainer has it look wherever metrics are fetched, before validation, at the end of each
    epoch and of training, and before what is saved.

    Attributes:
      state: the position of the run, from where the alarm counts.
      alarm: of this rank; it counts steps since training began.
      copies: hold the alarm under its name, maybe as it was some steps before.
      allgather: collects one small object per rank, in the order of ranks.
    """

    state: RunState
    alarm: LossAlarm
    copies: LateCopies
    allgather: Callable[[Any], list[Any]]

    def __post_init__(self) -> None:
        self._began = self._seen = self.state.step

    def look(self) -> None:
        """Checks the loss, unless this step was checked before; every rank calls it at the same
        steps.

        Raises:
          DivergedError: on all ranks, if a loss was not finite or too high.
        """
        if self._seen == self.state.step:
            return
        self._seen = self.state.step - self.copies.behind
        own = self.alarm.read(self.copies.read("alarm"))
        raised = [alarm for alarm in self.allgather(own) if alarm is not None]
        if raised:
            step, loss = min(raised, key=lambda alarm: alarm[0])
            why = (
                f"above 100 times that of guesses, {self.alarm.highest:.4g}"
                if math.isfinite(loss)
                else "not finite"
            )
            step += self._began
            raise DivergedError(
                f"step {step}: the loss is {loss:.4g}, {why}: {_REMEDY}", step, loss
            )
