"""Computes learning rate, momentum and bounds from the fractional epoch.

The fractional epoch is the number of images processed divided by the number of images in the
dataset. Each schedule of the learning rate is a class in `SCHEDULES`, whose fields are its flags.
To add one, write a class and its line there. `Schedule` combines learning rate, momentum and
bounds, and `create` builds it from plain values.

A step is described by the fractional epochs at its start and end. The learning rate is that at the
start. The bounds of Lu et al. use the end, so that they close exactly at T.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from hybrid_imagenet.options import option
from hybrid_imagenet.schedules.step_bounds import hybrid_bounds

Rate = Callable[[float], float]

EXPONENTS = ("epoch-T-1", "epoch-T", "epoch")
MOMENTUM_RULES = ("constant", "noise_scale", "noise_scale_inverse")
BOUND_TIMES = ("fractional", "epoch")
SCALINGS = ("workers", "batch", "none")
# The batch for which Goyal et al. give the learning rate.
REFERENCE_BATCH = 256
# Mikami et al. keep the noise scale of this batch at momentum 0.9.
NOISE_SCALE_BATCH = 32768
CREATE_FLAGS = (
    "lr_schedule",
    "lr",
    "lr_scaling",
    "warmup_epochs",
    "warmup_start_lr",
    "momentum",
    "momentum_rule",
    "adabound_bound_time",
    "hybrid_ramp_epochs",
)
"""The arguments of `create` that are flags. The fields of a schedule are flags too."""
_WARMUP_START_HELP = "Learning rate at which a linear warmup starts (not above its end)."


def require(value: str, allowed: Iterable[str]) -> None:
    """Raises ValueError if a value is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{value!r}: choose one of {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True)
class LinearWarmup:
    """Options of the warmup of Goyal et al."""

    warmup_start_lr: float = option(0.1, _WARMUP_START_HELP, minimum=0)


@dataclasses.dataclass(frozen=True)
class WarmupFromZero:
    """Options of the warmup for optimizers whose peak may be below the 0.1 of Goyal et al.

    A warmup that started at 0.1 would not rise.
    """

    warmup_start_lr: float = option(0.0, _WARMUP_START_HELP, minimum=0)


@dataclasses.dataclass(frozen=True)
class BoundedWarmup:
    """Options of the AdaBound warmup and of the transition to LARS."""

    adabound_bound_time: str = option(
        "fractional",
        "Time t in AdaBound's bounds: the epochs done after the step (fractional), or the number of"
        " the epoch (epoch).",
        choices=BOUND_TIMES,
    )
    hybrid_ramp_epochs: float = option(
        0.0,
        "Epochs after the warmup in which the learning rate of each layer moves from AdaBound's"
        " last step to LARS; 0 changes it at once.",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class MomentumRule:
    """Options of momentum that follows the batch."""

    momentum_rule: str = option(
        "constant",
        "How momentum follows the batch B: constant, noise_scale (1 - 0.1 * 32768 / B, Mikami et"
        " al.), or noise_scale_inverse (1 - 0.1 * B / 32768).",
        choices=MOMENTUM_RULES,
    )


@dataclasses.dataclass(frozen=True)
class AdamScaling:
    """Options of the learning rate of Adam inside AdaBound."""

    adabound_lr_scaling: bool = option(
        False, "Multiply AdaBound's learning rate alpha by the number of GPUs."
    )


Rule = LinearWarmup | WarmupFromZero | BoundedWarmup | MomentumRule | AdamScaling
"""Options of a schedule that only some optimizers have."""


@dataclasses.dataclass(frozen=True)
class Decay:
    """A schedule of the learning rate; its fields are its options.

    Attributes:
      own_peak: Largest learning rate of a schedule whose peak and warmup are fixed; None if they
        are options.
    """

    own_peak: ClassVar[float | None] = None

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        """Returns the learning rate at a fractional epoch.

        Args:
          epoch: Fractional epoch at the start of the step; at least `start`, unless the schedule
            has its own peak.
          peak: Learning rate at `start`.
          start: T, the epoch at which the warmup ends.
          end: Length of the run in epochs.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ExponentialDecay(Decay):
    """Multiplies the peak by lr_decay^k in epoch e = floor(epoch) + 1 (Lu et al. §2.2.1).

    Lu et al. print k = e, but also state that the decay starts from the peak, for which k must be
    e - T - 1. If T is not an integer, epochs are counted from T.
    """

    lr_decay: float = option(
        0.9, "Factor kappa per epoch of the exponential schedule.", minimum=0, maximum=1
    )
    lr_decay_exponent: str = option(
        "epoch-T-1",
        "Exponent of kappa in the exponential schedule (Lu et al. print epoch).",
        choices=EXPONENTS,
    )

    def __post_init__(self) -> None:
        require(self.lr_decay_exponent, EXPONENTS)

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        first_exponent = 0.0
        if self.lr_decay_exponent == "epoch-T":
            first_exponent = 1.0
        elif self.lr_decay_exponent == "epoch":
            first_exponent = 1.0 + start
        return float(peak * self.lr_decay ** (math.floor(epoch - start) + first_exponent))


@dataclasses.dataclass(frozen=True)
class StepDecay(Decay):
    """Multiplies the peak by a factor at each epoch of a list (Goyal et al. §5.1).

    Attributes:
      lr_step_factor: The factor; not a flag.
    """

    lr_steps: tuple[float, ...] = option(
        (30.0, 60.0, 80.0),
        "Epochs at which the step schedule divides the learning rate by 10.",
        minimum=0,
    )
    lr_step_factor: float = 0.1

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        steps_done = sum(epoch >= step_epoch for step_epoch in self.lr_steps)
        return float(peak * self.lr_step_factor**steps_done)


@dataclasses.dataclass(frozen=True)
class PolynomialDecay(Decay):
    """Decays from `peak` to `lr_final` by a power of the fraction of epochs left.

    lr_final + (peak - lr_final) (1 - (epoch - start) / (end - start))^lr_power
    """

    lr_power: float = option(2.0, "Power of the polynomial schedule.", minimum=0)
    lr_final: float = 0.0

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        fraction_left = 1.0 - (min(epoch, end) - start) / (end - start)
        return float(self.lr_final + (peak - self.lr_final) * fraction_left**self.lr_power)


@dataclasses.dataclass(frozen=True)
class CosineDecay(Decay):
    """Decays along half a cosine from `peak` at `start` to `lr_final` at `end`.

    Reference:
      Loshchilov, Hutter, arXiv 1608.03983.
    """

    lr_final: float = 0.0

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        progress = (min(epoch, end) - start) / (end - start)
        return self.lr_final + (peak - self.lr_final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclasses.dataclass(frozen=True)
class ConstantDecay(Decay):
    """Keeps the peak."""

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        return peak


@dataclasses.dataclass(frozen=True)
class FlashADecay(Decay):
    """Configuration A of Mikami et al.; `peak` has no effect.

    It is linear from 1e-5 to 34, then polynomial of power 2 to 0. The paper has 34 epochs of
    warmup; the code that it cites has 12 for a batch of 32K.
    """

    own_peak: ClassVar[float | None] = 34.0

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        if epoch < start:
            return linear_warmup(epoch, 1e-5, 34.0, start)
        return PolynomialDecay()(epoch, 34.0, start, end)


@dataclasses.dataclass(frozen=True)
class FlashBDecay(Decay):
    """Configuration B of Mikami et al., as printed; `peak` and `start` have no effect.

    It jumps at epochs 5 and 30.
    """

    own_peak: ClassVar[float | None] = 29.0

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        if epoch < 5:
            return linear_warmup(epoch, 0.2, 29.0, 5.0)
        return PolynomialDecay()(epoch, 29.0 if epoch < 30 else 50.0, 0.0, end)


@dataclasses.dataclass(frozen=True)
class MLPerfDecay(Decay):
    """Polynomial of power 2 to 0; peak, warmup and end come from `schedules.mlperf`."""

    def __call__(self, epoch: float, peak: float, start: float, end: float) -> float:
        return PolynomialDecay()(epoch, peak, start, end)


SCHEDULES: dict[str, type[Decay]] = {
    "exponential": ExponentialDecay,
    "step": StepDecay,
    "poly": PolynomialDecay,
    "cosine": CosineDecay,
    "constant": ConstantDecay,
    "flash_a": FlashADecay,
    "flash_b": FlashBDecay,
    "mlperf": MLPerfDecay,
}
FIXED_SCHEDULES = tuple(name for name, decay in SCHEDULES.items() if decay.own_peak is not None)
FLAGS_IGNORED_BY_FIXED = ("lr", "lr_scaling", "warmup_start_lr")
"""Flags that have no effect on the schedules in `FIXED_SCHEDULES`."""


def linear_warmup(epoch: float, start: float, peak: float, warmup_epochs: float) -> float:
    """Returns the learning rate on the line from `start` at epoch 0 to `peak` at the end."""
    return start + (peak - start) * epoch / warmup_epochs


def momentum_for_batch(batch: int, momentum: float, momentum_rule: str) -> float:
    """Returns the momentum of SGD for a batch, at least 0.

    `noise_scale` keeps the noise scale of batch 32768 at momentum 0.9 (Mikami et al.; Smith, Le,
    ICLR 2018). With noise lr N / (B (1 - m)) this gives m = 1 - 0.1 * 32768 / B. In the formula
    that Mikami et al. print, the operators are lost. `noise_scale_inverse` is the other reading, in
    which both 32768 and B are in the numerator with the learning rate, as printed: m = 1 - 0.1 B /
    32768. MLPerf's tuned momentum rises with the batch, as under `noise_scale`.

    Args:
      batch: Images per update.
      momentum: Returned if the rule is `constant`.
      momentum_rule: One of `MOMENTUM_RULES`.
    """
    if momentum_rule == "constant":
        return momentum
    if momentum_rule == "noise_scale_inverse":
        ratio = batch / NOISE_SCALE_BATCH
    else:
        ratio = NOISE_SCALE_BATCH / batch
    return max(0.0, 1.0 - 0.1 * ratio)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Computes learning rate, momentum and bounds of each step.

    The functions of `hi.schedules` make schedules, such as `hi.schedules.cosine`. A schedule is
    called with the fractional epochs of a step. Any function that is called like this and returns
    at least a learning rate can replace it in `hi.DistributedOptimizer(schedule=...)`.

    Example:
      schedule = hi.schedules.cosine(peak=0.4, epochs=10)
      print(schedule.learning_rate_at(5.0))  # 0.2

    Attributes:
      learning_rate_at: Function that returns the learning rate of SGD at a fractional epoch, for
        the batch `base_batch`.
      base_batch: Images per update for which `learning_rate_at` holds. The learning rate grows in
        proportion to the batch.
      momentum: Function that returns the momentum of SGD for a batch; None leaves the momentum of
        the optimizer as it is.
      peak: Largest learning rate; lr * N, at which the bounds of the warmup close, unless the
        schedule has its own.
      bounded_epochs: T of a bounded AdaBound warmup; 0 without one.
      bound_time: Time in the bounds: "fractional" for the epochs done after the step, or "epoch"
        for the number of the epoch.
      beta2: Decay of the second moment, in the bounds.
      ramp_epochs: Epochs after the bounded warmup in which LARS is ramped up
        (`hybrid_ramp_epochs`). The exponent s of its trust ratio grows from 0 to 1,
        so a layer's learning rate is learning_rate * ratio^s. At T every layer has the learning
        rate of AdaBound's last step, so that no layer's update jumps.
      scales_with_batch: Whether learning rate and peak are proportional to the batch.
      arguments: Arguments of `create`, if it made the schedule. A saved optimizer stores them to
        create the same schedule again.
    """

    learning_rate_at: Rate
    base_batch: int
    momentum: Callable[[int], float] | None
    peak: float
    bounded_epochs: float = 0.0
    bound_time: str = "fractional"
    beta2: float = 0.999
    ramp_epochs: float = 0.0
    scales_with_batch: bool = True
    arguments: Mapping[str, Any] | None = None

    def __call__(self, start: float, end: float, global_batch: int) -> dict[str, float]:
        """Returns the values of a step.

        Args:
          start: Fractional epoch at the start of the step.
          end: Fractional epoch at its end.
          global_batch: Images per update of all ranks.

        Returns:
          Numbers by name: `learning_rate`, `phase` (0 in a bounded warmup, else 1), `lower_bound`
          and `upper_bound` of AdaBound's step; `momentum`, unless the optimizer keeps its own; and
          `trust_ratio_exponent` s, in a run with a ramp. In phase 0 the learning rate is the
          one that SGD would have, lr * N.
        """
        if start < self.bounded_epochs:
            return self.bounded_warmup(start, end, global_batch)
        learning_rate = self.learning_rate_at(start) * self._scale(global_batch)
        peak = self._scaled_peak(global_batch)
        return self._values(start, global_batch, learning_rate, 1.0, (peak, peak))

    def bounded_warmup(self, start: float, end: float, global_batch: int) -> dict[str, float]:
        """Returns the values of a step of the bounded warmup, whose time t is that after the step.

        Args:
          start: Fractional epoch at the start of the step, before `bounded_epochs`.
          end: Fractional epoch at its end.
          global_batch: Images per update of all ranks.

        Reference:
          Lu et al. §2.2.1.
        """
        time = math.floor(start) + 1.0 if self.bound_time == "epoch" else end
        peak = self._scaled_peak(global_batch)
        bounds = hybrid_bounds(time, self.bounded_epochs, peak, self.beta2)
        return self._values(start, global_batch, peak, 0.0, bounds)

    def _scale(self, global_batch: int) -> float:
        return global_batch / self.base_batch if self.scales_with_batch else 1.0

    def _scaled_peak(self, global_batch: int) -> float:
        return self.peak * self._scale(global_batch)

    def _values(
        self,
        start: float,
        global_batch: int,
        learning_rate: float,
        phase: float,
        bounds: tuple[float, float],
    ) -> dict[str, float]:
        """Returns the values of a step by name, see `__call__`."""
        values = {"learning_rate": learning_rate}
        if self.momentum is not None:
            values["momentum"] = self.momentum(global_batch)
        values["phase"] = phase
        values["lower_bound"], values["upper_bound"] = bounds
        if self.ramp_epochs:
            progress = (start - self.bounded_epochs) / self.ramp_epochs
            values["trust_ratio_exponent"] = min(max(progress, 0.0), 1.0)
        return values


def scale_learning_rate(lr: float, lr_scaling: str, workers: int, batch: int) -> float:
    """Returns the learning rate after linear scaling.

    Args:
      lr: Learning rate before scaling.
      lr_scaling: `workers` for lr * N (Lu et al.), `batch` for lr * B / 256 (Goyal et al.), or
        `none`.
      workers: N.
      batch: B, images per update of all workers.
    """
    if lr_scaling == "workers":
        return lr * workers
    if lr_scaling == "batch":
        return lr * (batch / REFERENCE_BATCH)
    return float(lr)


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
    momentum: float | None = 0.9,
    momentum_rule: str = "constant",
    adabound_bound_time: str = "fractional",
    adabound_beta2: float = 0.999,
    hybrid_ramp_epochs: float = 0.0,
    **options: Any,
) -> Schedule:
    """Creates a schedule from the values of the training program's flags.

    Args:
      lr_schedule: Decay after the warmup: "exponential", "step", "poly", "cosine", "constant",
        "flash_a", "flash_b" or "mlperf", as for `--lr_schedule`.
      lr: Learning rate before scaling; "flash_a" and "flash_b" have their own.
      epochs: Length of the run, at which schedules end.
      workers: N, number of GPUs.
      base_batch: Images per update of all workers at the start of the run.
      lr_scaling: "workers" for lr * N, "batch" for lr * base_batch / 256, or "none"
        (default: "workers").
      warmup_epochs: T, length of the warmup in epochs (default: 0.0, no warmup).
      bounded_warmup: Whether AdaBound with closing bounds does the warmup, as in Lu et al., instead
        of a linear warmup (default: False).
      warmup_start_lr: Learning rate at which a linear warmup starts; the peak, if that is less
        (default: 0.1).
      momentum: Momentum of SGD; None leaves the momentum of the optimizer as it is (default: 0.9).
      momentum_rule: How momentum follows the batch B: "constant", "noise_scale"
        (1 - 0.1 * 32768 / B) or "noise_scale_inverse" (1 - 0.1 * B / 32768)
        (default: "constant").
      adabound_bound_time: Time in the bounds: "fractional" for the epochs done after the step, or
        "epoch" for the number of the epoch (default: "fractional").
      adabound_beta2: Decay of the second moment, in the bounds (default: 0.999).
      hybrid_ramp_epochs: Epochs after a bounded warmup in which LARS is blended in (default: 0.0).
      **options: Options of the decay: `lr_decay` and `lr_decay_exponent` of "exponential",
        `lr_steps` and `lr_step_factor` of "step", `lr_power` and `lr_final` of "poly", `lr_final`
        of "cosine".

    Returns:
      The schedule.

    Raises:
      ValueError: For a name that does not exist, or a negative learning rate.
      TypeError: For an option that the decay does not have.

    Reference:
      Goyal et al. §2.2, for the linear warmup; Lu et al. §2.2.1, for the bounded warmup.
    """
    arguments: dict[str, Any] = {
        "lr_schedule": lr_schedule,
        "lr": lr,
        "epochs": epochs,
        "workers": workers,
        "base_batch": base_batch,
        "lr_scaling": lr_scaling,
        "warmup_epochs": warmup_epochs,
        "bounded_warmup": bounded_warmup,
        "warmup_start_lr": warmup_start_lr,
        "momentum": momentum,
        "momentum_rule": momentum_rule,
        "adabound_bound_time": adabound_bound_time,
        "adabound_beta2": adabound_beta2,
        "hybrid_ramp_epochs": hybrid_ramp_epochs,
        **options,
    }
    require(lr_schedule, SCHEDULES)
    require(lr_scaling, SCALINGS)
    require(momentum_rule, MOMENTUM_RULES)
    require(adabound_bound_time, BOUND_TIMES)
    if lr < 0:
        raise ValueError(f"learning rate {lr:g}: must not be negative")
    # The decay divides by its length, which is 0 if the warmup lasts for the whole run.
    end = max(epochs, warmup_epochs + 1e-9)
    decay = SCHEDULES[lr_schedule](**options)
    has_own_peak = decay.own_peak is not None
    peak = decay.own_peak
    if peak is None:
        peak = scale_learning_rate(lr, lr_scaling, workers, base_batch)

    def learning_rate_at(epoch: float) -> float:
        if epoch < warmup_epochs and not bounded_warmup and not has_own_peak:
            return linear_warmup(epoch, min(warmup_start_lr, peak), peak, warmup_epochs)
        return decay(epoch, peak, warmup_epochs, end)

    def momentum_of(batch: int) -> float:
        # Only the rule `constant` uses this momentum.
        return momentum_for_batch(batch, momentum or 0.0, momentum_rule)

    sets_momentum = momentum is not None or momentum_rule != "constant"

    return Schedule(
        learning_rate_at=learning_rate_at,
        base_batch=base_batch,
        momentum=momentum_of if sets_momentum else None,
        peak=peak,
        bounded_epochs=warmup_epochs if bounded_warmup else 0.0,
        bound_time=adabound_bound_time,
        beta2=adabound_beta2,
        ramp_epochs=hybrid_ramp_epochs if bounded_warmup else 0.0,
        scales_with_batch=lr_scaling != "none" and not has_own_peak,
        arguments=arguments,
    )
