"""Decides whether a training continues with the loss scale of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.optimizers.loss_scale import LossScale


def describe(loss_scale: LossScale) -> dict[str, Any]:
    """Returns how a loss scale is configured, for the description of a checkpoint."""
    return {"dynamic": loss_scale.dynamic, "initial": float(loss_scale.initial)}


def restart_if_changed(loss_scale: LossScale, saved: Mapping[str, Any]) -> bool:
    """Starts a restored loss scale again if it was configured in another way when it was saved.

    A scale that was found for other settings may be useless: gradients underflow with a scale of 1
    that was meant for a model in FP32. The total of skipped steps stays, because the log shows it.

    Args:
      loss_scale: The scale as this training configures it, with the values of the checkpoint.
      saved: `describe` of the loss scale that the checkpoint has.

    Returns:
      Whether it starts again.
    """
    if describe(loss_scale) == saved:
        return False
    loss_scale.scale.assign(loss_scale.initial)
    loss_scale.good_steps.assign(0)
    loss_scale.skipped_in_a_row.assign(0)
    return True


def restart_note(loss_scale: LossScale) -> str:
    """Returns a line for the user about a loss scale that starts again."""
    return (
        f"the loss scale starts again at {loss_scale.initial:g}, because the checkpoint has"
        " another (loss scale, precision, compression or number of ranks has changed)"
    )
