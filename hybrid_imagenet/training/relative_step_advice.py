"""Compares the relative step of LARS or LAMB in a run with published ones, and advises on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hybrid_imagenet.optimizers.registry import HybridOptions, LarsOptions
from hybrid_imagenet.run_plan import OptimizerPlan, RunPlan
from hybrid_imagenet.schedules import mlperf, relative_step

# LARC's clip limits the step, whatever the learning rate is.
_CLIPPED = "larc"


@dataclasses.dataclass(frozen=True)
class Peak:
    """The largest relative step of a run.

    Attributes:
      value: The relative step.
      epoch: First epoch that has it, from 1.
      learning_rate: At that time.
      momentum: At that time.
      batch: Images per update at that time.
    """

    value: float
    epoch: int
    learning_rate: float
    momentum: float
    batch: int


def at_step(optimizer: OptimizerPlan, values: Mapping[str, float]) -> float | None:
    """Returns the relative step of one update.

    For LAMB it is the learning rate. With LARC's clip it is the largest step that the clip allows,
    eta c / (1 - momentum).

    Args:
      optimizer: Plan of the optimizer.
      values: `learning_rate`, `momentum` and `phase` of the update.

    Returns:
      The relative step; None while LARS does not act fully.
    """
    if optimizer.spec.relative_rate:
        return values["learning_rate"]
    options = optimizer.options
    variant = options.layer_variant
    is_ramp = values.get("trust_ratio_exponent", 1.0) < 1.0
    if variant == "none" or values["phase"] < 0.5 or is_ramp:
        return None
    momentum = values["momentum"]
    learning_rate = 1.0 if variant == _CLIPPED else values["learning_rate"]
    factor = options.gradient_factor(momentum)
    return relative_step.relative_step(
        learning_rate, _trust_coefficient(optimizer), momentum, factor
    )


def _trust_coefficient(optimizer: OptimizerPlan) -> float:
    """Returns the trust coefficient of an optimizer with LARS."""
    options = optimizer.options
    assert isinstance(options, LarsOptions | HybridOptions)
    # The program always sets it.
    assert options.trust_coefficient is not None
    return options.trust_coefficient


def peak(plan: RunPlan) -> Peak | None:
    """Returns the largest relative step of a run, or None if its optimizer has none.

    Compares the starts of epochs and the end of the warmup.
    """
    largest = None
    for epoch in plan.peak_epochs():
        values = plan.values_at(epoch)
        step = at_step(plan.optimizer, values)
        if step is not None and (largest is None or step > largest.value):
            batch = plan.global_batch(int(epoch))
            largest = Peak(step, int(epoch) + 1, values["learning_rate"], values["momentum"], batch)
    return largest


def tuned(optimizer: OptimizerPlan, batch: int) -> float:
    """Returns the relative step with which the optimizer is known to train ImageNet at a batch."""
    if optimizer.spec.relative_rate:
        return relative_step.published_lamb_step(batch)
    return mlperf.tuned_step(batch)


def line(plan: RunPlan) -> str | None:
    """Describes the peak of the relative step next to the tuned one; None without a peak."""
    top = peak(plan)
    if top is None:
        return None
    tuned_step = tuned(plan.optimizer, top.batch)
    if plan.optimizer.spec.relative_rate:
        return (
            f"relative step {top.value:.2g} in epoch {top.epoch} (LAMB's learning rate); its"
            f" authors have {tuned_step:.2g} at batch {top.batch}"
        )
    options = plan.optimizer.options
    factor = options.gradient_factor(top.momentum)
    rate = f"learning rate {top.learning_rate:.4g} x "
    if options.layer_variant == _CLIPPED:
        rate = ""
    eta = _trust_coefficient(plan.optimizer)
    return (
        f"relative step {top.value:.2g} in epoch {top.epoch} ({rate}eta {eta:.4g} x gradient factor"
        f" {factor:.4g} / (1 - momentum {top.momentum:.4g})); tuned LARS has {tuned_step:.2g} at"
        f" batch {top.batch}"
    )


def warning(plan: RunPlan) -> str | None:
    """Warns if the peak is more than a factor of 4 from the tuned step; names a flag and value."""
    top = peak(plan)
    if top is None or top.value <= 0:
        return None
    tuned_step = tuned(plan.optimizer, top.batch)
    if not relative_step.is_far_from(top.value, tuned_step):
        return None
    flag, value = remedy(plan, top, tuned_step)
    times = max(tuned_step / top.value, top.value / tuned_step)
    digits = 0 if times >= 10 else 1
    comparison = "smaller" if top.value < tuned_step else "larger"
    method = "LARS"
    reference = "tuned LARS has"
    if plan.optimizer.spec.relative_rate:
        method = "LAMB"
        reference = "its authors have"
    return (
        f"the relative step of {method}, {top.value:.2g}, is {times:.{digits}f} times {comparison}"
        f" than {reference} on ImageNet at batch {top.batch}, {tuned_step:.2g}:"
        f" --{flag}={value:.3g} gives that"
    )


def remedy(plan: RunPlan, top: Peak, wanted: float) -> tuple[str, float]:
    """Returns the flag, with its value, that gives a run the wanted peak of the relative step.

    It is the learning rate where that acts on LARS only. The learning rate of hybrid acts on the
    warmup too, and some schedules and LARC's clip do not use --lr: then it is the trust
    coefficient.
    """
    optimizer = plan.optimizer
    is_clipped = optimizer.options.layer_variant == _CLIPPED
    if optimizer.spec.bounded_warmup or is_clipped or plan.schedule.decay.own_peak is not None:
        return "lars_eta", _trust_coefficient(optimizer) * wanted / top.value
    return "lr", plan.schedule.learning_rate * wanted / top.value
