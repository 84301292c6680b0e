"""Learning rate, momentum and bounds as functions of the fractional epoch, the images processed over the data set.

The pure functions come first; `Schedule` puts them together and `create` builds one from plain values. A step is
described by the fractional epochs at its start and end. The learning rate is that at the start; the bounds of Lu et al.
take the end, so that they close exactly at T.

A schedule is a function of the epoch, the peak of the learning rate, the epoch T at which the warmup ends, and the
epoch at which the run ends; its other arguments are flags of the same name. A new one needs a line in `SCHEDULES`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

from hybrid_imagenet.numerics.bounds import hybrid_bounds

Rate = Callable[[float], float]
Exponent = Literal["epoch-T-1", "epoch-T", "epoch"]
MomentumRule = Literal["constant", "noise_scale", "noise_scale_inverse"]
BoundTime = Literal["fractional", "epoch"]

EXPONENTS = get_args(Exponent)
MOMENTUM_RULES = get_args(MomentumRule)
SCALINGS = ("workers", "batch", "none")
REFERENCE_BATCH = 256  # Goyal et al.: the batch of the unscaled learning rate
NOISE_SCALE_BATCH = 32768  # Mikami et al.: the batch whose noise scale is kept, at momentum 0.9


def linear(epoch: float, start: float, peak: float, epochs: float) -> float:
    """From `start` at epoch 0 to `peak` at `epochs`."""
    return start + (peak - start) * epoch / epochs


def gradual_warmup(
    epoch: float, peak: float, epochs: float, *, warmup_start_lr: Annotated[float, ">= 0"] = 0.1
) -> float:
    """Linear to `peak` at `epochs` (Goyal et al. 2.2).

    Args:
      epoch: fractional epoch at the start of the step, below `epochs`.
      peak: learning rate at its end.
      epochs: its length.
      warmup_start_lr: where a linear warmup starts (not above its end).
    """
    return linear(epoch, min(warmup_start_lr, peak), peak, epochs)


def exponential(
    epoch: float,
    peak: float,
    start: float,
    end: float,
    *,
    lr_decay: Annotated[float, "0 to 1"] = 0.9,
    lr_decay_exponent: Exponent = "epoch-T-1",
) -> float:
    """peak lr_decay^k in the steps of epoch number e = floor(epoch) + 1 (Lu et al. 2.2.1).

    They print k = e and say that the decay starts from the peak; k = e - T - 1 does so. For a T that is not whole,
    epochs are counted from T.

    Args:
      epoch: fractional epoch at the start of the step, T or more.
      peak: lr * N.
      start: T.
      end: of the run.
      lr_decay: factor kappa per epoch of the exponential schedule.
      lr_decay_exponent: exponent of kappa; Lu et al. print epoch.

    Raises:
      ValueError: for an exponent that does not exist.
    """
    del end
    _require(lr_decay_exponent, EXPONENTS)
    k = math.floor(epoch - start) + {"epoch-T-1": 0.0, "epoch-T": 1.0, "epoch": 1.0 + start}[lr_decay_exponent]
    return float(peak * lr_decay**k)


def step(
    epoch: float,
    peak: float,
    start: float,
    end: float,
    *,
    lr_steps: Annotated[tuple[float, ...], ">= 0"] = (30.0, 60.0, 80.0),
    lr_step_factor: Annotated[float, "0 to 1"] = 0.1,
) -> float:
    """peak times a factor for each epoch of a list that has been reached (Goyal et al. 5.1).

    Args:
      epoch: fractional epoch.
      peak: learning rate before the first of them.
      start: T.
      end: of the run.
      lr_steps: epochs at which the step schedule falls.
      lr_step_factor: by how much the step schedule falls.
    """
    del start, end
    return float(peak * lr_step_factor ** sum(epoch >= m for m in lr_steps))


def poly(
    epoch: float,
    peak: float,
    start: float,
    end: float,
    *,
    lr_power: Annotated[float, ">= 0"] = 2.0,
    lr_final: Annotated[float, ">= 0"] = 0.0,
) -> float:
    """lr_final + (peak - lr_final) (1 - (epoch - start) / (end - start))^lr_power between epochs `start` and `end`.

    Args:
      epoch: fractional epoch.
      peak: at `start`.
      start: T.
      end: of the run.
      lr_power: power of the polynomial schedule.
      lr_final: where the schedule ends.
    """
    left = 1.0 - (min(epoch, end) - start) / (end - start)
    return float(lr_final + (peak - lr_final) * left**lr_power)


def cosine(epoch: float, peak: float, start: float, end: float, *, lr_final: Annotated[float, ">= 0"] = 0.0) -> float:
    """Half a cosine from `peak` at epoch `start` to `lr_final` at `end` (Loshchilov, Hutter, arXiv 1608.03983).

    Args:
      epoch: fractional epoch.
      peak: at `start`.
      start: T.
      end: of the run.
      lr_final: where the schedule ends.
    """
    progress = (min(epoch, end) - start) / (end - start)
    return lr_final + (peak - lr_final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def constant(epoch: float, peak: float, start: float, end: float) -> float:
    """The peak throughout."""
    del epoch, start, end
    return peak


def sony_a(epoch: float, peak: float, start: float, end: float) -> float:
    """Configuration A of Mikami et al.: linear from 1e-5 to 34, then polynomial of power 2 to 0; `peak` plays no part.

    They have 34 epochs of warmup; the code that they cite has 12 for a batch of 32K.
    """
    del peak
    return linear(epoch, 1e-5, 34.0, start) if epoch < start else poly(epoch, 34.0, start, end)


def sony_b(epoch: float, peak: float, start: float, end: float) -> float:
    """Configuration B of Mikami et al., as printed; it jumps at epochs 5 and 30. `peak` and `start` play no part."""
    del peak, start
    if epoch < 5:
        return linear(epoch, 0.2, 29.0, 5.0)
    return poly(epoch, 29.0 if epoch < 30 else 50.0, 0.0, end)


def mlperf(epoch: float, peak: float, start: float, end: float) -> float:
    """Polynomial of power 2 to 0; peak, warmup and end are in `numerics.mlperf`."""
    return poly(epoch, peak, start, end)


@dataclasses.dataclass(frozen=True)
class Decay:
    """A schedule by name.

    Attributes:
      rate: rate(epoch, peak, T, end of the run, **options).
      fixed: peak and warmup are part of it.
    """

    rate: Callable[..., float]
    fixed: bool = False


SCHEDULES = {
    "exponential": Decay(exponential),
    "step": Decay(step),
    "poly": Decay(poly),
    "cosine": Decay(cosine),
    "constant": Decay(constant),
    "sony_a": Decay(sony_a, fixed=True),
    "sony_b": Decay(sony_b, fixed=True),
    "mlperf": Decay(mlperf),
}
FIXED = tuple(name for name, decay in SCHEDULES.items() if decay.fixed)


def noise_scale_momentum(batch: int, *, inverse: bool = False) -> float:
    """The momentum that keeps SGD's noise scale of batch 32768 at momentum 0.9 (Mikami et al.; Smith, Le, ICLR 2018).

    With noise lr N / (B (1 - m)): m = 1 - 0.1 * 32768 / B. `inverse` is the other reading of the formula of Mikami et
    al., whose operators are lost: 1 - 0.1 B / 32768. The result is held within [0, 1).
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
    bound_time: BoundTime = "fractional",
    adabound_beta2: Annotated[float, "0 to 0.999999"] = 0.999,
) -> tuple[float, float]:
    """The bounds of the AdaBound warmup in the step from fractional epoch `start` to `end` (Lu et al. 2.2.1).

    Args:
      start: of the step.
      end: of the step.
      warmup_epochs: T.
      peak: lr * N, at which they close.
      bound_time: the time in the bounds; the epochs done after the step, or the number of the epoch.
      adabound_beta2: decay of the second moment.
    """
    t = math.floor(start) + 1.0 if bound_time == "epoch" else end
    return hybrid_bounds(t, warmup_epochs, peak, adabound_beta2)


def adam_rate(adabound_lr: float, workers: int, *, adabound_lr_scaling: bool = False) -> float:
    """alpha, the learning rate of Adam inside AdaBound.

    Args:
      adabound_lr: unscaled.
      workers: number of GPUs.
      adabound_lr_scaling: multiply alpha by the number of GPUs.
    """
    return adabound_lr * workers if adabound_lr_scaling else adabound_lr


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The scalars of each step.

    Attributes:
      rate: learning rate of SGD at a fractional epoch, for the batch `base_batch`.
      base_batch: images per update for which `rate` holds; the rate grows in proportion to the batch.
      momentum: momentum of SGD for a batch.
      peak: lr * N, at which the bounds of the warmup close.
      bounded_epochs: T of a bounded AdaBound warmup, 0 without one.
      bounds: lower and upper bound from (start, end, T, peak) of a step.
      scales_with_batch: whether rate and peak follow the batch.
    """

    rate: Rate
    base_batch: int
    momentum: Callable[[int], float]
    peak: float
    bounded_epochs: float = 0.0
    bounds: Callable[[float, float, float, float], tuple[float, float]] = warmup_bounds
    scales_with_batch: bool = True

    def __call__(self, start: float, end: float, global_batch: int) -> dict[str, float]:
        """The values for the step from fractional epoch `start` to `end` with `global_batch` images.

        Returns:
          learning_rate, momentum, phase (0: bounded warmup, 1: SGD), lower_bound and upper_bound. In phase 0 the
          learning rate is the one that SGD would have, lr * N.
        """
        scale = global_batch / self.base_batch if self.scales_with_batch else 1.0
        peak = self.peak * scale
        bounded = start < self.bounded_epochs
        lower, upper = self.bounds(start, end, self.bounded_epochs, peak) if bounded else (peak, peak)
        return {
            "learning_rate": peak if bounded else self.rate(start) * scale,
            "momentum": self.momentum(global_batch),
            "phase": 0.0 if bounded else 1.0,
            "lower_bound": lower,
            "upper_bound": upper,
        }


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
    bound_time: BoundTime = "fractional",
    adabound_beta2: float = 0.999,
    **options: Any,
) -> Schedule:
    """Builds a schedule. Arguments that are flags too have the flags' names.

    Args:
      lr_schedule: a name in `SCHEDULES`.
      lr: learning rate before scaling; of no effect on the schedules in `FIXED`.
      epochs: length of the run, where schedules end that have an end.
      workers: N.
      base_batch: images per update of all workers at the start of the run.
      lr_scaling: one of `SCALINGS`, see `peak_rate`.
      warmup_epochs: T; of a bounded warmup if `bounded_warmup`, else of a linear one.
      bounded_warmup: whether AdaBound with closing bounds does the warmup (Lu et al.).
      warmup_start_lr: see `gradual_warmup`.
      momentum: of SGD.
      momentum_rule: see `momentum_at`.
      bound_time: see `warmup_bounds`.
      adabound_beta2: see `warmup_bounds`.
      options: of the schedule.

    Raises:
      ValueError: for a name that does not exist.
    """
    _require(lr_schedule, SCHEDULES)
    _require(lr_scaling, SCALINGS)
    _require(momentum_rule, MOMENTUM_RULES)
    _require(bound_time, get_args(BoundTime))
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
        bounds=functools.partial(warmup_bounds, bound_time=bound_time, adabound_beta2=adabound_beta2),
        scales_with_batch=lr_scaling != "none" and not decay.fixed,
    )


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with all learning rates times `factor`: of SGD, and the one at which the warmup's bounds close."""
    if factor == 1.0:
        return schedule
    return dataclasses.replace(schedule, rate=lambda e: factor * schedule.rate(e), peak=factor * schedule.peak)


def _require(value: str, allowed: Sequence[str] | dict[str, Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{value!r}: choose one of {', '.join(allowed)}")
