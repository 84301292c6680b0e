"""Forecasts when a run reaches an accuracy on ImageNet.

Usage: python -m studies.forecast -np GPUS [FLAG ...]

docs/planning.md describes the method and its errors.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import numpy as np

from hybrid_imagenet import config as configuration
from hybrid_imagenet import run_plan
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.training import relative_step_advice

TOP1_BY_STEP_FRACTION = (
    (0.0033, 0.761),
    (0.0294, 0.751),
    (0.0816, 0.731),
    (0.160, 0.691),
    (0.265, 0.640),
    (0.395, 0.590),
    (0.552, 0.523),
    (0.735, 0.425),
    (0.941, 0.324),
)
"""Top-1 accuracy on ImageNet by the relative step as a fraction of the tuned one.

From NVIDIA's log of MLPerf v2.0 at batch 3,264.
"""
BATCHES = (408, 67456)
"""The smallest and the largest batch of the logs on which the forecast was tested."""
# The forecast errs by about one point at the first accuracy, and by 0.2 points from the second on.
_ACCURACIES = (0.70, 0.74, 0.75)
# Network and length of the trainings in the logs.
_RESNET50 = ("resnet50", 64, 224, (), None)


TUNED_STEP = 0.105
TUNED_BATCH = 3264
"""A tuned point of MLPerf. The others are within a factor of 1.7 of the square-root law through it.
"""


def tuned_step_law(batch: float) -> float:
    """Returns the peak relative step of tuned LARS at a batch: 0.105 sqrt(B / 3264).

    MLPerf's ten points from 1632 to 67840 images (`schedules.mlperf`) follow it within a factor of
    1.7.
    """
    return TUNED_STEP * math.sqrt(batch / TUNED_BATCH)


def forecast_top1(step: float, batch: float) -> float | None:
    """Forecasts the validation top-1 of ResNet-50 on ImageNet while LARS trains.

    The accuracy follows the relative step divided by the square root of the batch, not the epoch.

    Args:
      step: Relative step at that time.
      batch: Images per update.

    Returns:
      A fraction up to 0.761; None for a batch outside `BATCHES`.
    """
    if not BATCHES[0] <= batch <= BATCHES[1]:
        return None
    fractions, top1 = zip(*TOP1_BY_STEP_FRACTION, strict=True)
    fraction = max(step / tuned_step_law(batch), fractions[0])
    return float(np.interp(math.log(fraction), np.log(fractions), top1))


def epochs_to_accuracies(plan: RunPlan) -> dict[float, int]:
    """Returns the epoch after which each of 70, 74 and 75 % is reached, for those that are.

    Raises:
      UserError: For runs other than LARS or hybrid with ResNet-50 on ImageNet.
    """
    top = relative_step_advice.peak(plan)
    network = (
        plan.network.model,
        plan.network.width,
        plan.image_sizes.stages[-1][1],
        plan.network.frozen_layers,
        plan.max_steps,
    )
    if top is None or plan.optimizer.spec.relative_rate or network != _RESNET50:
        raise UserError(
            "The forecast is for ResNet-50 with 224 pixels and LARS. Use --optimizer=lars or"
            " --optimizer=hybrid, and omit flags of other networks."
        )
    reached: dict[float, int] = {}
    for epoch in range(top.epoch, int(plan.epochs) + 1):
        step = relative_step_advice.at_step(plan.optimizer, plan.values_at(epoch - 0.01))
        top1 = None if step is None else forecast_top1(step, plan.global_batch(epoch - 1))
        for accuracy in _ACCURACIES:
            if top1 is not None and top1 >= accuracy:
                reached.setdefault(accuracy, epoch)
    return reached


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.forecast",
        description="Forecasts when a training of ResNet-50 on ImageNet with LARS or hybrid reaches"
        " 70, 74 and 75 % top-1. Other words are flags of training.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np", type=command_line.positive_int, default=1, metavar="N", help="number of GPUs"
    )
    options, flags = parser.parse_known_args(arguments)
    plan = run_plan.make(configuration.resolve(flags, options.np))
    reached = epochs_to_accuracies(plan)
    print(f"{mlperf.TRAIN_IMAGES:,} images, batch {plan.base_batch:,}, {plan.epochs:g} epochs")
    if not reached:
        print("forecast: below 70 % to the end, or a batch outside the tested logs")
    for accuracy, epoch in sorted(reached.items()):
        print(f"forecast: {accuracy:.0%} after epoch {epoch}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
