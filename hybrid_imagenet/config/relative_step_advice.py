"""Computes the relative step of LARS or LAMB under a configuration: at one step, at its peak,
beside published ones.
"""

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

_GOALS = (
    0.70,
    0.74,
    0.75,
)  # of the forecast, whose error is about a point at the first and .2 from the second on


@dataclasses.dataclass(frozen=True)
class Peak:
    """The largest relative step of a run, the first epoch that has it, from 1, and the step's
    values there.
    """

    value: float
    epoch: int
    learning_rate: float
    momentum: float
    batch: int


def at_step(config: RunConfig, values: Mapping[str, float]) -> float | None:
    """The relative step under the `learning_rate`, `momentum` and `phase` of a step; None where
    LARS is not all there.

    With LARC's clip it is the largest that the clip allows, eta c / (1 - momentum), whatever the
    rate is; LAMB's is the rate.
    """
    if OPTIMIZERS[config.optimizer].relative_rate:
        return values["learning_rate"]
    variant = config.chosen.get("lars_variant", "none")
    if variant == "none" or values["phase"] < 0.5 or values.get("lars_share", 1.0) < 1.0:
        return None
    rate, momentum = 1.0 if variant == "larc" else values["learning_rate"], values["momentum"]
    factor = derived.gradient_factor(config, momentum)
    return relative_step.relative_step(rate, config.chosen["lars_eta"], momentum, factor)


def peak(config: RunConfig) -> Peak | None:
    """The largest relative step at the beginning of an epoch or around the end of the warmup; None
    without one.
    """
    schedule, stages = derived.schedule(config), derived.batches(config)
    found = None
    for start in derived.peak_epochs(config):
        batch = stages.at(int(start)).global_batch(config.gpus)
        values = schedule(start, start, batch)
        step = at_step(config, values)
        if step is not None and (found is None or step > found.value):
            found = Peak(step, int(start) + 1, values["learning_rate"], values["momentum"], batch)
    return found


def tuned(config: RunConfig, batch: int) -> float:
    """The relative step that the configuration's method is known to train ImageNet with at a
    batch.
    """
    relative_rate = OPTIMIZERS[config.optimizer].relative_rate
    return relative_step.published_lamb_step(batch) if relative_rate else mlperf.tuned_step(batch)


def line(config: RunConfig) -> str | None:
    """Describes the peak of the relative step, beside the peak of tuned LARS, in one line; None
    without one.
    """
    top = peak(config)
    if top is None:
        return None
    if OPTIMIZERS[config.optimizer].relative_rate:
        known = f"its authors have {tuned(config, top.batch):.2g} at batch {top.batch}"
        return f"relative step {top.value:.2g} in epoch {top.epoch} (LAMB's learning rate); {known}"
    factor = derived.gradient_factor(config, top.momentum)
    rate = (
        ""
        if config.chosen["lars_variant"] == "larc"
        else f"learning rate {top.learning_rate:.4g} x "
    )
    eta = config.chosen["lars_eta"]
    return (
        f"relative step {top.value:.2g} in epoch {top.epoch} ({rate}eta {eta:.4g} x gradient factor"
        f" {factor:.4g} / (1 - momentum {top.momentum:.4g})); tuned LARS has"
        f" {tuned(config, top.batch):.2g} at batch {top.batch}"
    )


def forecast(config: RunConfig, num_examples: int) -> str | None:
    """When LARS would have 70, 74 and 75 % on ImageNet, in one line; None for other networks, data
    and optimizers.
    """
    top, other = peak(config), OPTIMIZERS[config.optimizer].relative_rate
    if num_examples != mlperf.TRAIN_IMAGES or top is None or other:
        return None
    network = (config.model, config.model_width, config.image_size, config.freeze, config.max_steps)
    if network != ("resnet50", 64, 224, (), None) or config.num_classes not in (None, 1000):
        return None
    schedule, stages = derived.schedule(config), derived.batches(config)
    reached: dict[float, int] = {}
    for epoch in range(top.epoch, int(config.epochs) + 1):
        batch = stages.at(epoch - 1).global_batch(config.gpus)
        step = at_step(config, schedule(epoch - 0.01, epoch - 0.01, batch))
        top1 = relative_step.forecast_top1(step, batch) if step is not None else None
        for goal in _GOALS:
            if top1 is not None and top1 >= goal:
                reached.setdefault(goal, epoch)
    found = ", ".join(f"{goal:.0%} after epoch {epoch}" for goal, epoch in sorted(reached.items()))
    return f"forecast by the relative step: {found} (docs/dev/forecast.md)" if found else None


def warning(config: RunConfig) -> str | None:
    """One line with a remedy where the peak is more than a factor of 4 from tuned LARS at its
    batch; else None.
    """
    top = peak(config)
    wanted = tuned(config, top.batch) if top else 0.0
    if top is None or top.value <= 0 or not relative_step.is_far_from(top.value, wanted):
        return None
    flag, value = remedy(config, top, wanted)
    times = max(wanted / top.value, top.value / wanted)
    side = "smaller" if top.value < wanted else "larger"
    method, whose = (
        ("LAMB", "its authors have")
        if OPTIMIZERS[config.optimizer].relative_rate
        else ("LARS", "tuned LARS has")
    )
    return (
        f"the relative step of {method}, {top.value:.2g}, is {times:.{0 if times >= 10 else 1}f}"
        f" times {side} than {whose} on ImageNet at batch {top.batch}, {wanted:.2g}:"
        f" --{flag}={value:.3g} gives that"
    )


def remedy(config: RunConfig, top: Peak, wanted: float) -> tuple[str, float]:
    """The flag, and its value, that turns the peak into `wanted`: the rate of LARS, else its trust
    coefficient.

    The rate of hybrid is also the rate of its warmup, and some schedules and LARC's clip have no
    use for --lr.
    """
    warms_up = OPTIMIZERS[config.optimizer].bounded_warmup
    clips, fixed = (
        config.chosen.get("lars_variant") == "larc",
        config.lr_schedule in FIXED_SCHEDULES,
    )
    flag = "lars_eta" if warms_up or clips or fixed else "lr"
    return flag, getattr(config, flag) * wanted / top.value
