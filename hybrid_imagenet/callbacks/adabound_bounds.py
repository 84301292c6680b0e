"""The bounds of AdaBound during the warmup of hybrid gradient computing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.callbacks.step_schedule import StepSchedule, is_bounded_warmup
from hybrid_imagenet.training_run import StepSpan


class AdaBoundBounds(StepSchedule):
    """Closes the bounds on AdaBound's step sizes during the warmup of the hybrid method.

    It is one of `default_callbacks()`. It acts on optimizers whose schedule begins with such a
    warmup, as `hi.schedules.hybrid` makes it, in the steps of the warmup only.

    In epoch t of a warmup of T epochs, with the learning rate lr, N workers and the decay β2 of
    the second moment, each step size of Adam is clipped to [η_l(t), η_u(t)]:

        η_l(t) = (t / T) lr N
        η_u(t) = lr N + 1 / ((1 - β2) t) - 1 / ((1 - β2) T)

    At t = 0 the bounds are 0 and infinity, which is Adam. At t = T both are lr N, which is SGD with
    the learning rate that `LARSSchedule` continues with. t counts the fractional epochs that are
    done after the step, so the bounds close exactly at the end of the warmup.

    Reference:
      Lu et al. §2.2.1; `schedules.step_bounds.hybrid_bounds` is the formula in Python.
    """

    def applies_to(self, optimizer: Any, epoch: float) -> bool:
        return is_bounded_warmup(optimizer, epoch)

    def values(self, schedule: Any, span: StepSpan) -> Mapping[str, float]:
        """Returns the bounds of a step, and the learning rate lr N at which they close."""
        values: Mapping[str, float] = schedule.bounded_warmup(*span)
        return values
