"""Learning rate, momentum and bounds as functions of the fractional epoch, the images processed over the data set.

The pure functions come first; `Schedule` puts them together and `create` builds one from plain values. A step is
described by the fractional epochs at its start and end. The learning rate is that at the start; H's bounds take the
end, so that they close exactly at T.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from hybrid_imagenet.numerics.bounds import hybrid_bounds

Rate = Callable[[float], float]

NAMES = ("exponential", "step", "poly", "cosine", "constant", "sony_a", "sony_b", "mlperf")
FIXED = ("sony_a", "sony_b")  # peak and warmup are part of the schedule
EXPONENTS = ("epoch-T-1", "epoch-T", "epoch")
MOMENTUM_RULES = ("constant", "noise_scale", "noise_scale_inverse")
SCALINGS = ("workers", "batch", "none")
BOUND_TIMES = ("fractional", "epoch")
REFERENCE_BATCH = 256  # G: the batch of the unscaled learning rate
NOISE_SCALE_BATCH = 32768  # S: the batch whose noise scale is kept, at momentum 0.9


def warmup(epoch: float, start: float, peak: float, epochs: float) -> float:
    """Linear from `start` at epoch 0 to `peak` at `epochs` (G 2.2)."""
    return start + (peak - start) * epoch / epochs


def exponential(epoch: float, peak: float, kappa: float, warmup_epochs: float, exponent: str = "epoch-T-1") -> float:
    """peak kappa^k in the steps of epoch number e = floor(epoch) + 1 (H 2.2.1).

    H prints k = e and says that the decay starts from the peak; k = e - T - 1 does so. For a T that is not whole,
    epochs are counted from T.

    Args:
      epoch: fractional epoch at the start of the step, T or more.
      peak: lr * N.
      kappa: factor per epoch.
      warmup_epochs: T.
      exponent: what k is: epoch-T-1, epoch-T or epoch, where "epoch" is e.
    """
    k = math.floor(epoch - warmup_epochs) + {"epoch-T-1": 0.0, "epoch-T": 1.0, "epoch": 1.0 + warmup_epochs}[exponent]
    return float(peak * kappa**k)


def step_decay(epoch: float, peak: float, milestones: Sequence[float], factor: float = 0.1) -> float:
    """peak times `factor` for each milestone (in epochs) that has been reached (G 5.1)."""
    return float(peak * factor ** sum(epoch >= m for m in milestones))


def polynomial(epoch: float, peak: float, start: float, end: float, power: float = 2.0, final: float = 0.0) -> float:
    """final + (peak - final) (1 - (epoch - start) / (end - start))^power between epochs `start` and `end`."""
    left = 1.0 - (min(epoch, end) - start) / (end - start)
    return float(final + (peak - final) * left**power)


def cosine(epoch: float, peak: float, start: float, end: float, final: float = 0.0) -> float:
    """Half a cosine from `peak` at epoch `start` to `final` at `end` (Loshchilov, Hutter, arXiv 1608.03983)."""
    progress = (min(epoch, end) - start) / (end - start)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def sony_a(epoch: float, warmup_epochs: float = 34.0, epochs: float = 90.0) -> float:
    """Configuration A of S: linear from 1e-5 to 34, then polynomial of power 2 to 0.

    S has 34 epochs of warmup; the code that it cites has 12 for a batch of 32K.
    """
    if epoch < warmup_epochs:
        return warmup(epoch, 1e-5, 34.0, warmup_epochs)
    return polynomial(epoch, 34.0, warmup_epochs, epochs)


def sony_b(epoch: float, epochs: float = 90.0) -> float:
    """Configuration B of S, as printed; it jumps at epochs 5 and 30."""
    if epoch < 5:
        return warmup(epoch, 0.2, 29.0, 5.0)
    return polynomial(epoch, 29.0 if epoch < 30 else 50.0, 0.0, epochs)


def noise_scale_momentum(batch: int, *, inverse: bool = False) -> float:
    """The momentum that keeps SGD's noise scale of batch 32768 at momentum 0.9 (S; Smith, Le, ICLR 2018).

    With noise lr N / (B (1 - m)): m = 1 - 0.1 * 32768 / B. `inverse` is the other reading of the formula in S, whose
    operators are lost: 1 - 0.1 B / 32768. The result is held within [0, 1).
    """
    ratio = batch / NOISE_SCALE_BATCH if inverse else NOISE_SCALE_BATCH / batch
    return max(0.0, 1.0 - 0.1 * ratio)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The scalars of each step.

    Attributes:
      rate: learning rate of SGD at a fractional epoch, for the batch `base_batch`.
      base_batch: images per update for which `rate` holds; the rate grows in proportion to the batch.
      momentum: momentum of SGD for a batch.
      peak: lr * N, at which the bounds of the warmup close.
      bounded_epochs: T of a bounded AdaBound warmup, 0 without one.
      bound_time: `fractional` or `epoch`, t in the bounds.
      beta2: decay of the second moment, part of the upper bound.
      scales_with_batch: whether rate and peak follow the batch.
    """

    rate: Rate
    base_batch: int
    momentum: Callable[[int], float]
    peak: float
    bounded_epochs: float = 0.0
    bound_time: str = "fractional"
    beta2: float = 0.999
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
        t = math.floor(start) + 1.0 if self.bound_time == "epoch" else end
        lower, upper = hybrid_bounds(t, self.bounded_epochs, peak, self.beta2) if bounded else (peak, peak)
        return {
            "learning_rate": peak if bounded else self.rate(start) * scale,
            "momentum": self.momentum(global_batch),
            "phase": 0.0 if bounded else 1.0,
            "lower_bound": lower,
            "upper_bound": upper,
        }


def peak_rate(lr: float, scaling: str, workers: int, batch: int) -> float:
    """The learning rate after linear scaling: lr * N as H prints it, lr * B / 256 as in G, or lr itself.

    Args:
      lr: unscaled learning rate.
      scaling: workers, batch or none.
      workers: N.
      batch: images per update.
    """
    return lr * {"workers": workers, "batch": batch / REFERENCE_BATCH, "none": 1.0}[scaling]


def create(
    *,
    schedule: str,
    lr: float,
    epochs: float,
    workers: int,
    base_batch: int,
    scaling: str = "workers",
    warmup_epochs: float = 0.0,
    bounded_warmup: bool = False,
    warmup_start_lr: float = 0.0,
    kappa: float = 0.9,
    exponent: str = "epoch-T-1",
    milestones: Sequence[float] = (30.0, 60.0, 80.0),
    factor: float = 0.1,
    power: float = 2.0,
    final_lr: float = 0.0,
    momentum: float = 0.9,
    momentum_rule: str = "constant",
    bound_time: str = "fractional",
    beta2: float = 0.999,
) -> Schedule:
    """Builds a schedule.

    Args:
      schedule: one of `NAMES`.
      lr: learning rate before scaling; of no effect on the schedules in `FIXED`.
      epochs: length of the run, where poly, cosine, mlperf and S's schedules end.
      workers: N.
      base_batch: images per update of all workers at the start of the run.
      scaling: one of `SCALINGS`, see `peak_rate`.
      warmup_epochs: T; of a bounded warmup if `bounded_warmup`, else of a linear one.
      bounded_warmup: whether AdaBound with closing bounds does the warmup (H).
      warmup_start_lr: where a linear warmup starts; G: 0.1, never above the peak.
      kappa: factor of the exponential schedule.
      exponent: one of `EXPONENTS`.
      milestones: epochs at which the step schedule falls.
      factor: by which it falls.
      power: of poly.
      final_lr: where poly and cosine end.
      momentum: of SGD.
      momentum_rule: one of `MOMENTUM_RULES`.
      bound_time: one of `BOUND_TIMES`.
      beta2: of AdaBound.

    Raises:
      ValueError: for a name that does not exist.
    """
    _require((schedule, NAMES), (exponent, EXPONENTS), (scaling, SCALINGS), (bound_time, BOUND_TIMES))
    peak = peak_rate(lr, scaling, workers, base_batch)
    start, end = warmup_epochs, max(epochs, warmup_epochs + 1e-9)

    def poly(epoch: float) -> float:
        return polynomial(epoch, peak, start, end, power, final_lr)

    decay: Rate = {
        "exponential": lambda e: exponential(e, peak, kappa, start, exponent),
        "step": lambda e: step_decay(e, peak, milestones, factor),
        "poly": poly,
        "cosine": lambda e: cosine(e, peak, start, end, final_lr),
        "constant": lambda e: peak,
        "sony_a": lambda e: sony_a(e, start, end),
        "sony_b": lambda e: sony_b(e, end),
        "mlperf": poly,  # peak, warmup and end are in `numerics.mlperf`
    }[schedule]
    if warmup_epochs > 0 and not bounded_warmup and schedule not in FIXED:
        decay = _after_warmup(decay, min(warmup_start_lr, peak), peak, warmup_epochs)
    return Schedule(
        rate=decay,
        base_batch=base_batch,
        momentum=_momentum(momentum_rule, momentum),
        peak=peak,
        bounded_epochs=warmup_epochs if bounded_warmup else 0.0,
        bound_time=bound_time,
        beta2=beta2,
        scales_with_batch=scaling != "none" and schedule not in FIXED,
    )


def rule(optimizer: str, phase: float) -> str:
    """The name of the update rule that an optimizer follows in a phase: AdaBound, SGD or LARS."""
    if optimizer == "hybrid":
        return "SGD" if phase else "AdaBound"
    return {"adabound": "AdaBound", "sgd": "SGD", "lars": "LARS"}[optimizer]


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with all learning rates times `factor`: of SGD, and the one at which the warmup's bounds close."""
    if factor == 1.0:
        return schedule
    return dataclasses.replace(schedule, rate=lambda e: factor * schedule.rate(e), peak=factor * schedule.peak)


def _require(*choices: tuple[str, Sequence[str]]) -> None:
    for value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"{value!r}: choose one of {', '.join(allowed)}")


def _after_warmup(decay: Rate, first: float, peak: float, epochs: float) -> Rate:
    return lambda e: warmup(e, first, peak, epochs) if e < epochs else decay(e)


def _momentum(rule: str, momentum: float) -> Callable[[int], float]:
    _require((rule, MOMENTUM_RULES))
    if rule == "constant":
        return lambda batch: momentum
    return lambda batch: noise_scale_momentum(batch, inverse=rule == "noise_scale_inverse")
