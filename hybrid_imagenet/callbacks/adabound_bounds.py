"""The bounds of AdaBound during the warmup of hybrid gradient computing."""

from __future__ import annotations

from hybrid_imagenet.callbacks.step_schedule import StepSchedule, is_bounded_warmup
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer


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
    `schedules.step_bounds.hybrid_bounds` computes the bounds.

    Args:
      communicator: the connected ranks (default: None, those of this process).

    Reference:
      Lu et al. §2.2.1.
    """

    def sets(self, optimizer: DistributedOptimizer, start: float) -> bool:
        return is_bounded_warmup(optimizer, start)
