"""Compares the relative step of LARS or LAMB in a run with published ones, and advises on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybrid_imagenet.config import derived
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.schedules import mlperf, relative_step
from hybrid_imagenet.schedules.training_schedule import FIXED_SCHEDULES

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

# LARC's clip limits the step, whatever the learning rate is.
_CLIPPED = "larc"


@dataclasses.dataclass(frozen=True)
class Peak:
    """The largest relative step of a run.

    Attributes:
      value: the relative step.
      epoch: first epoch that has it, from 1.
      learning_rate: at that time.
      momentum: at that time.
      batch: images per update at that time.
    """

    value: float
    epoch: int
    learning_rate: float
    momentum: float
    batch: int


def at_step(config: RunConfig, values: Mapping[str, float]) -> float | None:
    """Returns the relative step of one update.

    For LAMB it is the learning rate. With LARC's clip it is the largest step that the clip allows,
    eta c / (1 - momentum).

    Args:
      config: of the run.
      values: `learning_rate`, `momentum` and `phase` of the update.

    Returns:
      The relative step; None while LARS does not act fully.
    """
    if OPTIMIZERS[config.optimization.optimizer].relative_rate:
        return values["learning_rate"]
    variant = config.optimizer_options.get("lars_variant", "none")
    is_ramp = values.get("trust_ratio_exponent", 1.0) < 1.0
    if variant == "none" or values["phase"] < 0.5 or is_ramp:
        return None
    momentum = values["momentum"]
    learning_rate = 1.0 if variant == _CLIPPED else values["learning_rate"]
    factor = derived.gradient_factor(config, momentum)
    return relative_step.relative_step(
        learning_rate, config.optimizer_options["lars_eta"], momentum, factor
    )


def peak(config: RunConfig) -> Peak | None:
    """Returns the largest relative step of a run, or None if its optimizer has none.

    Compares the starts of epochs and the end of the warmup.
    """
    schedule = derived.schedule(config)
    stages = derived.batches(config)
    largest = None
    for epoch in derived.peak_epochs(config):
        batch = stages.at(int(epoch)).global_batch(config.gpus)
        values = schedule(epoch, epoch, batch)
        step = at_step(config, values)
        if step is not None and (largest is None or step > largest.value):
            largest = Peak(step, int(epoch) + 1, values["learning_rate"], values["momentum"], batch)
    return largest


def tuned(config: RunConfig, batch: int) -> float:
    """Returns the relative step with which the optimizer is known to train ImageNet at a batch."""
    if OPTIMIZERS[config.optimization.optimizer].relative_rate:
        return relative_step.published_lamb_step(batch)
    return mlperf.tuned_step(batch)


def line(config: RunConfig) -> str | None:
    """Describes the peak of the relative step next to the tuned one; None without a peak."""
    top = peak(config)
    if top is None:
        return None
    tuned_step = tuned(config, top.batch)
    if OPTIMIZERS[config.optimization.optimizer].relative_rate:
        return (
            f"relative step {top.value:.2g} in epoch {top.epoch} (LAMB's learning rate); its"
            f" authors have {tuned_step:.2g} at batch {top.batch}"
        )
    factor = derived.gradient_factor(config, top.momentum)
    rate = f"learning rate {top.learning_rate:.4g} x "
    if config.optimizer_options["lars_variant"] == _CLIPPED:
        rate = ""
    eta = config.optimizer_options["lars_eta"]
    return (
        f"relative step {top.value:.2g} in epoch {top.epoch} ({rate}eta {eta:.4g} x gradient factor"
        f" {factor:.4g} / (1 - momentum {top.momentum:.4g})); tuned LARS has {tuned_step:.2g} at"
        f" batch {top.batch}"
    )


def warning(config: RunConfig) -> str | None:
    """Warns if the peak is more than a factor of 4 from the tuned step; names a flag and value."""
    top = peak(config)
    if top is None or top.value <= 0:
        return None
    tuned_step = tuned(config, top.batch)
    if not relative_step.is_far_from(top.value, tuned_step):
        return None
    flag, value = remedy(config, top, tuned_step)
    times = max(tuned_step / top.value, top.value / tuned_step)
    digits = 0 if times >= 10 else 1
    side = "smaller" if top.value < tuned_step else "larger"
    method = "LARS"
    whose = "tuned LARS has"
    if OPTIMIZERS[config.optimization.optimizer].relative_rate:
        method = "LAMB"
        whose = "its authors have"
    return (
        f"the relative step of {method}, {top.value:.2g}, is {times:.{digits}f} times {side} than"
        f" {whose} on ImageNet at batch {top.batch}, {tuned_step:.2g}: --{flag}={value:.3g} gives"
        " that"
    )


def remedy(config: RunConfig, top: Peak, wanted: float) -> tuple[str, float]:
    """Returns the flag, with its value, that gives a run the wanted peak of the relative step.

    It is the learning rate where that acts on LARS only. The learning rate of hybrid acts on the
    warmup too, and some schedules and LARC's clip do not use --lr: then it is the trust
    coefficient.
    """
    warms_up_with_rate = OPTIMIZERS[config.optimization.optimizer].bounded_warmup
    is_clipped = config.optimizer_options.get("lars_variant") == _CLIPPED
    is_fixed = config.optimization.lr_schedule in FIXED_SCHEDULES
    if warms_up_with_rate or is_clipped or is_fixed:
        return "lars_eta", config.optimizer_options["lars_eta"] * wanted / top.value
    return "lr", config.optimization.lr * wanted / top.value
