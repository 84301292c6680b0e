"""Computes learning rate, momentum and bounds from the fractional epoch (images processed over
images in the set).

A schedule of the learning rate by name is a class of `SCHEDULES`, whose fields are its flags: a new
one is a class and its line there. `Schedule` puts rates, momentum and bounds together, and `create`
builds one from plain values. A step is described by the fractional epochs at its start and end. The
learning rate is that at the start; the bounds of Lu et al. take the end, so that they close exactly
at T.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from hybrid_imagenet.options import option
from hybrid_imagenet.schedules.adabound_bounds import hybrid_bounds

Rate = Callable[[float], float]

EXPONENTS = ("epoch-T-1", "epoch-T", "epoch")
MOMENTUM_RULES = ("constant", "noise_scale", "noise_scale_inverse")
BOUND_TIMES = ("fractional", "epoch")
SCALINGS = ("workers", "batch", "none")
REFERENCE_BATCH = 256  # Goyal et al.: the batch of the unscaled learning rate
NOISE_SCALE_BATCH = 32768  # Mikami et al.: the batch whose noise scale is kept, at momentum 0.9
FLAGS = (
    *(
        "lr_schedule",
        "lr",
        "lr_scaling",
        "warmup_epochs",
        "warmup_start_lr",
        "momentum",
        "momentum_rule",
    ),
    *("adabound_bound_time", "adabound_beta2", "hybrid_ramp_epochs"),
)
"""The arguments of `create` that are flags, besides those of a schedule."""
_WARMUP_START = "Where a linear warmup starts (not above its end)."


def require(value: str, allowed: Iterable[str]) -> None:
    """Raises ValueError for a value that is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{value!r}: choose one of {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True)
class LinearWarmup:
    """Options of the warmup of Goyal et al."""

    warmup_start_lr: float = option(0.1, _WARMUP_START, minimum=0)


@dataclasses.dataclass(frozen=True)
class WarmupFromZero:
    """The same for optimizers whose peak may lie below the 0.1 of Goyal et al., where nothing would
    rise.
    """

    warmup_start_lr: float = option(0.0, _WARMUP_START, minimum=0)


@dataclasses.dataclass(frozen=True)
class BoundedWarmup:
    """Options of the AdaBound warmup, and of the way from there to LARS."""

    adabound_bound_time: str = option(
        "fractional",
        "The time in the bounds; the epochs done after the step, or the number of the epoch.",
        choices=BOUND_TIMES,
    )
    hybrid_ramp_epochs: float = option(
        0.0,
        "Epochs after T in which the learning rate of each layer moves from AdaBound's last step to"
        " LARS; 0 for none.",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class MomentumRule:
    """Options of momentum that follows the batch."""

    momentum_rule: str = option(
        "constant",
        "Momentum when the batch changes; constant, 1 - .1 * 32768 / B (noise_scale, Mikami et"
        " al.), or 1 - .1 * B / 32768 (noise_scale_inverse).",
        choices=MOMENTUM_RULES,
    )


@dataclasses.dataclass(frozen=True)
class AdamScaling:
    """Options of the learning rate of Adam inside AdaBound."""

    adabound_lr_scaling: bool = option(False, "Multiply alpha by the number of GPUs.")


@dataclasses.dataclass(frozen=True)
class Decay:
    """A schedule of the learning rate; its fields are its options.

    Attributes:
      fixed: peak and warmup are part of it.
    """

    fixed: ClassVar[bool] = False

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        """The learning rate at a fractional epoch.

        Args:
          epoch: at the start of the step; `start` or more, unless the schedule is fixed.
          peak: learning rate at `start`.
          start: T, at which the warmup ends.
          end: of the run.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Exponential(Decay):
    """peak lr_decay^k in the steps of epoch number e = floor(epoch) + 1 (Lu et al. §2.2.1).

    They print k = e and say that the decay starts from the peak; k = e - T - 1 does so. For a T
    that is not whole, epochs are counted from T.
    """

    lr_decay: float = option(
        0.9, "Factor kappa per epoch of the exponential schedule.", minimum=0, maximum=1
    )
    lr_decay_exponent: str = option(
        "epoch-T-1", "Exponent of kappa; Lu et al. print epoch.", choices=EXPONENTS
    )

    def __post_init__(self) -> None:
        require(self.lr_decay_exponent, EXPONENTS)

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        first = {"epoch-T-1": 0.0, "epoch-T": 1.0, "epoch": 1.0 + start}[self.lr_decay_exponent]
        return float(peak * self.lr_decay ** (math.floor(epoch - start) + first))


@dataclasses.dataclass(frozen=True)
class Step(Decay):
    """The peak times a factor for each epoch of a list that has been reached (Goyal et al.
    §5.1).
    """

    lr_steps: tuple[float, ...] = option(
        (30.0, 60.0, 80.0), "Epochs at which the step schedule falls.", minimum=0
    )
    lr_step_factor: float = option(
        0.1, "By how much the step schedule falls.", minimum=0, maximum=1
    )

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        return float(peak * self.lr_step_factor ** sum(epoch >= m for m in self.lr_steps))


@dataclasses.dataclass(frozen=True)
class Poly(Decay):
    """lr_final + (peak - lr_final) (1 - (epoch - start) / (end - start))^lr_power between epochs
    `start` and `end`.
    """

    lr_power: float = option(2.0, "Power of the polynomial schedule.", minimum=0)
    lr_final: float = option(0.0, "Where the schedule ends.", minimum=0)

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        left = 1.0 - (min(epoch, end) - start) / (end - start)
        return float(self.lr_final + (peak - self.lr_final) * left**self.lr_power)


@dataclasses.dataclass(frozen=True)
class Cosine(Decay):
    """Half a cosine from `peak` at epoch `start` to `lr_final` at `end` (Loshchilov, Hutter, arXiv
    1608.03983).
    """

    lr_final: float = option(0.0, "Where the schedule ends.", minimum=0)

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        progress = (min(epoch, end) - start) / (end - start)
        return self.lr_final + (peak - self.lr_final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclasses.dataclass(frozen=True)
class Constant(Decay):
    """The peak throughout."""

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        return peak


@dataclasses.dataclass(frozen=True)
class SonyA(Decay):
    """Configuration A of Mikami et al.: linear from 1e-5 to 34, then polynomial of power 2 to 0;
    `peak` plays no part.

    They have 34 epochs of warmup; the code that they cite has 12 for a batch of 32K.
    """

    fixed: ClassVar[bool] = True

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        return (
            linear(epoch, 1e-5, 34.0, start) if epoch < start else Poly()(epoch, 34.0, start, end)
        )


@dataclasses.dataclass(frozen=True)
class SonyB(Decay):
    """Configuration B of Mikami et al., as printed; it jumps at epochs 5 and 30. `peak` and `start`
    play no part.
    """

    fixed: ClassVar[bool] = True

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        if epoch < 5:
            return linear(epoch, 0.2, 29.0, 5.0)
        return Poly()(epoch, 29.0 if epoch < 30 else 50.0, 0.0, end)


@dataclasses.dataclass(frozen=True)
class MLPerf(Decay):
    """Polynomial of power 2 to 0; peak, warmup and end are in `schedules.mlperf`."""

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        return Poly()(epoch, peak, start, end)


SCHEDULES: dict[str, type[Decay]] = {
    "exponential": Exponential,
    "step": Step,
    "poly": Poly,
    "cosine": Cosine,
    "constant": Constant,
    "sony_a": SonyA,
    "sony_b": SonyB,
    "mlperf": MLPerf,
}
FIXED = tuple(name for name, decay in SCHEDULES.items() if decay.fixed)
PUBLISHED = (
    "lr",
    "lr_scaling",
    "warmup_start_lr",
)  # flags of which the schedules in `FIXED` make no use


def linear(epoch: float, start: float, peak: float, epochs: float) -> float:
    """From `start` at epoch 0 to `peak` at `epochs`."""
    return start + (peak - start) * epoch / epochs


def momentum_at(batch: int, momentum: float, momentum_rule: str) -> float:
    """The momentum of SGD for a batch, in images per update; `momentum` where the rule
    (`MomentumRule`) is constant.

    `noise_scale` keeps the noise scale of batch 32768 at momentum 0.9 (Mikami et al.; Smith, Le,
    ICLR 2018). With noise lr N / (B (1 - m)): m = 1 - 0.1 * 32768 / B. `noise_scale_inverse` is the
    other reading of the formula of Mikami et al., whose operators are lost: 1 - 0.1 B / 32768, with
    32768 and B both beside the learning rate above the line, as printed. MLPerf's tuned momentum
    rises with the batch as the first does. The result is held within [0, 1).
    """
    if momentum_rule == "constant":
        return momentum
    ratio = (
        batch / NOISE_SCALE_BATCH
        if momentum_rule == "noise_scale_inverse"
        else NOISE_SCALE_BATCH / batch
    )
    return max(0.0, 1.0 - 0.1 * ratio)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The scalars of each step.

    Attributes:
      rate: learning rate of SGD at a fractional epoch, for the batch `base_batch`.
      base_batch: images per update for which `rate` holds; the learning rate grows in proportion to
      the batch.
      momentum: momentum of SGD for a batch.
      peak: lr * N, at which the bounds of the warmup close.
      bounded_epochs: T of a bounded AdaBound warmup, 0 without one.
      bound_time: see `BoundedWarmup.adabound_bound_time`.
      beta2: decay of the second moment, in the bounds.
      ramp_epochs: epochs after the bounded warmup in which LARS comes in
        (`BoundedWarmup.hybrid_ramp_epochs`): the share s, with which its ratio acts (a layer's rate
        is a ratio^s), grows from 0. At T every layer has the rate of the last step of AdaBound, so
        that no layer's update jumps.
      scales_with_batch: whether rate and peak follow the batch.
      arguments: of `create`, where that has made it: a saved optimizer is given the same schedule
        again.
    """

    rate: Rate
    base_batch: int
    momentum: Callable[[int], float]
    peak: float
    bounded_epochs: float = 0.0
    bound_time: str = "fractional"
    beta2: float = 0.999
    ramp_epochs: float = 0.0
    scales_with_batch: bool = True
    arguments: Mapping[str, Any] | None = None

    def __call__(self, start: float, end: float, global_batch: int) -> dict[str, float]:
        """The values for the step from fractional epoch `start` to `end` with `global_batch`
        images.

        Returns:
          learning_rate, momentum, phase (0: bounded warmup, 1: SGD), lower_bound and upper_bound,
          and lars_share where LARS comes in over some epochs. In phase 0 the learning rate is the
          one that SGD would have, lr * N.
        """
        scale = global_batch / self.base_batch if self.scales_with_batch else 1.0
        peak = self.peak * scale
        bounded = start < self.bounded_epochs
        time = math.floor(start) + 1.0 if self.bound_time == "epoch" else end
        lower, upper = (
            hybrid_bounds(time, self.bounded_epochs, peak, self.beta2) if bounded else (peak, peak)
        )
        values = {
            "learning_rate": peak if bounded else self.rate(start) * scale,
            "momentum": self.momentum(global_batch),
            "phase": 0.0 if bounded else 1.0,
            "lower_bound": lower,
            "upper_bound": upper,
        }
        if self.ramp_epochs:
            values["lars_share"] = min(
                max((start - self.bounded_epochs) / self.ramp_epochs, 0.0), 1.0
            )
        return values


def peak_rate(lr: float, lr_scaling: str, workers: int, batch: int) -> float:
    """The learning rate after linear scaling: lr * N (Lu et al.), lr * B / 256 (Goyal et al.), or
    lr itself.
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
    momentum_rule: str = "constant",
    adabound_bound_time: str = "fractional",
    adabound_beta2: float = 0.999,
    hybrid_ramp_epochs: float = 0.0,
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
      warmup_start_lr: where a linear warmup starts; not above its end (Goyal et al. §2.2).
      momentum, momentum_rule: of SGD, see `MomentumRule`.
      adabound_bound_time, hybrid_ramp_epochs: of a bounded warmup, see `BoundedWarmup`.
      adabound_beta2: decay of the second moment, in its bounds.
      options: the fields of the schedule.

    Raises:
      ValueError: for a name that does not exist.
    """
    arguments = {name: value for name, value in locals().items() if name != "options"} | options
    require(lr_schedule, SCHEDULES)
    require(lr_scaling, SCALINGS)
    require(momentum_rule, MOMENTUM_RULES)
    require(adabound_bound_time, BOUND_TIMES)
    if lr < 0:
        raise ValueError(f"learning rate {lr:g}: must not be negative")
    peak = peak_rate(lr, lr_scaling, workers, base_batch)
    start, end = warmup_epochs, max(epochs, warmup_epochs + 1e-9)
    decay = SCHEDULES[lr_schedule](**options)

    def rate(epoch: float) -> float:
        if epoch < warmup_epochs and not bounded_warmup and not decay.fixed:
            return linear(epoch, min(warmup_start_lr, peak), peak, warmup_epochs)
        return decay(epoch, peak, start, end)

    return Schedule(
        rate=rate,
        base_batch=base_batch,
        momentum=lambda batch: momentum_at(batch, momentum, momentum_rule),
        peak=peak,
        bounded_epochs=warmup_epochs if bounded_warmup else 0.0,
        bound_time=adabound_bound_time,
        beta2=adabound_beta2,
        ramp_epochs=hybrid_ramp_epochs if bounded_warmup else 0.0,
        scales_with_batch=lr_scaling != "none" and not decay.fixed,
        arguments=arguments,
    )
