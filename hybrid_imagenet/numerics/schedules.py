"""Computes learning rate, momentum and bounds from the fractional epoch (images processed over images in the set).

The pure functions come first; `Schedule` puts them together and `create` builds one from plain values. A step is
described by the fractional epochs at its start and end. The learning rate is that at the start; the bounds of Lu et al.
take the end, so that they close exactly at T. What a schedule does after the warmup is in `decays`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from hybrid_imagenet.numerics.bounds import hybrid_bounds
from hybrid_imagenet.numerics.decays import SCHEDULES, gradual_warmup, require

Rate = Callable[[float], float]
MomentumRule = Literal["constant", "noise_scale", "noise_scale_inverse"]
BoundTime = Literal["fractional", "epoch"]

MOMENTUM_RULES = get_args(MomentumRule)
SCALINGS = ("workers", "batch", "none")
REFERENCE_BATCH = 256  # Goyal et al.: the batch of the unscaled learning rate
NOISE_SCALE_BATCH = 32768  # Mikami et al.: the batch whose noise scale is kept, at momentum 0.9


def noise_scale_momentum(batch: int, *, inverse: bool = False) -> float:
    """The momentum that keeps SGD's noise scale of batch 32768 at momentum 0.9 (Mikami et al.; Smith, Le, ICLR 2018).

    With noise lr N / (B (1 - m)): m = 1 - 0.1 * 32768 / B. `inverse` is the other reading of the formula of Mikami et
    al., whose operators are lost: 1 - 0.1 B / 32768, with 32768 and B both beside the learning rate above the line, as
    printed. MLPerf's tuned momentum rises with the batch as the first does. The result is held within [0, 1).
    """
    ratio = batch / NOISE_SCALE_BATCH if inverse else NOISE_SCALE_BATCH / batch
    return max(0.0, 1.0 - 0.1 * ratio)


def momentum_at(batch: int, momentum: float, *, momentum_rule: MomentumRule = "constant") -> float:
    """The momentum of SGD for a batch.

    Args:
      batch: images per update.
      momentum: where the rule is constant.
      momentum_rule: momentum when the batch changes; constant, 1 - .1 * 32768 / B (noise_scale, Mikami et al.), or
        1 - .1 * B / 32768 (noise_scale_inverse).
    """
    if momentum_rule == "constant":
        return momentum
    return noise_scale_momentum(batch, inverse=momentum_rule == "noise_scale_inverse")


def warmup_bounds(
    start: float,
    end: float,
    warmup_epochs: float,
    peak: float,
    *,
    adabound_bound_time: BoundTime = "fractional",
    adabound_beta2: Annotated[float, "0 to 0.999999"] = 0.999,
) -> tuple[float, float]:
    """The bounds of the AdaBound warmup in the step from fractional epoch `start` to `end` (Lu et al. 2.2.1).

    Args:
      start: of the step.
      end: of the step.
      warmup_epochs: T.
      peak: lr * N, at which they close.
      adabound_bound_time: the time in the bounds; the epochs done after the step, or the number of the epoch.
      adabound_beta2: decay of the second moment.
    """
    t = math.floor(start) + 1.0 if adabound_bound_time == "epoch" else end
    return hybrid_bounds(t, warmup_epochs, peak, adabound_beta2)


def adam_rate(adabound_lr: float, workers: int, *, adabound_lr_scaling: bool = False) -> float:
    """alpha, the learning rate of Adam inside AdaBound.

    Args:
      adabound_lr: unscaled.
      workers: number of GPUs.
      adabound_lr_scaling: multiply alpha by the number of GPUs.
    """
    return adabound_lr * workers if adabound_lr_scaling else adabound_lr


def lars_share(epoch: float, warmup_epochs: float, *, hybrid_ramp_epochs: Annotated[float, ">= 0"] = 0.0) -> float:
    """s, with which the ratio of LARS acts after the AdaBound warmup: a layer's rate is a ratio^s.

    At T every layer has the rate of the last step of AdaBound, so that no layer's update jumps.

    Args:
      epoch: fractional epoch at the start of the step.
      warmup_epochs: T.
      hybrid_ramp_epochs: epochs after T in which the rate of each layer goes from that of AdaBound's last step to that
        of LARS; 0 for none.
    """
    if not hybrid_ramp_epochs:
        return 1.0
    return min(max((epoch - warmup_epochs) / hybrid_ramp_epochs, 0.0), 1.0)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The scalars of each step.

    Attributes:
      rate: learning rate of SGD at a fractional epoch, for the batch `base_batch`.
      base_batch: images per update for which `rate` holds; the rate grows in proportion to the batch.
      momentum: momentum of SGD for a batch.
      peak: lr * N, at which the bounds of the warmup close.
      bounded_epochs: T of a bounded AdaBound warmup, 0 without one.
      ramp_epochs: epochs after it in which LARS comes in, see `lars_share`.
      bounds: lower and upper bound from (start, end, T, peak) of a step.
      scales_with_batch: whether rate and peak follow the batch.
      arguments: of `create`, where that has made it: a saved optimizer is given the same schedule again.
    """

    rate: Rate
    base_batch: int
    momentum: Callable[[int], float]
    peak: float
    bounded_epochs: float = 0.0
    ramp_epochs: float = 0.0
    bounds: Callable[[float, float, float, float], tuple[float, float]] = warmup_bounds
    scales_with_batch: bool = True
    arguments: Mapping[str, Any] | None = None

    def __call__(self, start: float, end: float, global_batch: int) -> dict[str, float]:
        """The values for the step from fractional epoch `start` to `end` with `global_batch` images.

        Returns:
          learning_rate, momentum, phase (0: bounded warmup, 1: SGD), lower_bound and upper_bound, and lars_share where
          LARS comes in over some epochs. In phase 0 the learning rate is the one that SGD would have, lr * N.
        """
        scale = global_batch / self.base_batch if self.scales_with_batch else 1.0
        peak = self.peak * scale
        bounded = start < self.bounded_epochs
        lower, upper = self.bounds(start, end, self.bounded_epochs, peak) if bounded else (peak, peak)
        share = lars_share(start, self.bounded_epochs, hybrid_ramp_epochs=self.ramp_epochs)
        return {
            "learning_rate": peak if bounded else self.rate(start) * scale,
            "momentum": self.momentum(global_batch),
            "phase": 0.0 if bounded else 1.0,
            "lower_bound": lower,
            "upper_bound": upper,
        } | ({"lars_share": share} if self.ramp_epochs else {})


def peak_rate(lr: float, lr_scaling: str, workers: int, batch: int) -> float:
    """The learning rate after linear scaling: lr * N (Lu et al.), lr * B / 256 (Goyal et al.), or lr itself.

    Args:
      lr: unscaled learning rate.
      lr_scaling: workers, batch or none.
      workers: N.
      batch: images per update.
    """
    return lr * {"workers": workers, "batch": batch / REFERENCE_BATCH, "none": 1.0}[lr_scaling]


def create(
    *,
    lr_schedule: str,
    lr: float,
    epochs: float,
    workers: int,
    base_batch: int,
    lr_scaling: str = "workers",
    warmup_epochs: float = 0.0,
    bounded_warmup: bool = False,
    warmup_start_lr: float = 0.1,
    momentum: float = 0.9,
    momentum_rule: MomentumRule = "constant",
    adabound_bound_time: BoundTime = "fractional",
    adabound_beta2: float = 0.999,
    hybrid_ramp_epochs: float = 0.0,
    **options: Any,
) -> Schedule:
    """Builds a schedule. Arguments that are flags too have the flags' names.

    Args:
      lr_schedule: a name in `decays.SCHEDULES`.
      lr: learning rate before scaling; of no effect on the schedules in `decays.FIXED`.
      epochs: length of the run, where schedules end that have an end.
      workers: N.
      base_batch: images per update of all workers at the start of the run.
      lr_scaling: one of `SCALINGS`, see `peak_rate`.
      warmup_epochs: T; of a bounded warmup if `bounded_warmup`, else of a linear one.
      bounded_warmup: whether AdaBound with closing bounds does the warmup (Lu et al.).
      warmup_start_lr: see `decays.gradual_warmup`.
      momentum: of SGD.
      momentum_rule: see `momentum_at`.
      adabound_bound_time: see `warmup_bounds`.
      adabound_beta2: see `warmup_bounds`.
      hybrid_ramp_epochs: see `lars_share`; of a bounded warmup only.
      options: of the schedule.

    Raises:
      ValueError: for a name that does not exist.
    """
    arguments = {name: value for name, value in locals().items() if name != "options"} | options
    require(lr_schedule, SCHEDULES)
    require(lr_scaling, SCALINGS)
    require(momentum_rule, MOMENTUM_RULES)
    require(adabound_bound_time, get_args(BoundTime))
    peak = peak_rate(lr, lr_scaling, workers, base_batch)
    start, end = warmup_epochs, max(epochs, warmup_epochs + 1e-9)
    decay = SCHEDULES[lr_schedule]
    decay.rate(start, peak, start, end, **options)  # raises for wrong options

    def rate(epoch: float) -> float:
        if epoch < warmup_epochs and not bounded_warmup and not decay.fixed:
            return gradual_warmup(epoch, peak, warmup_epochs, warmup_start_lr=warmup_start_lr)
        return decay.rate(epoch, peak, start, end, **options)

    return Schedule(
        rate=rate,
        base_batch=base_batch,
        momentum=lambda batch: momentum_at(batch, momentum, momentum_rule=momentum_rule),
        peak=peak,
        bounded_epochs=warmup_epochs if bounded_warmup else 0.0,
        ramp_epochs=hybrid_ramp_epochs if bounded_warmup else 0.0,
        bounds=functools.partial(warmup_bounds, adabound_bound_time=adabound_bound_time, adabound_beta2=adabound_beta2),
        scales_with_batch=lr_scaling != "none" and not decay.fixed,
        arguments=arguments,
    )
