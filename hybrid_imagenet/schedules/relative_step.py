"""Computes the relative step of LARS: a layer's change per update over the norm of its weights.

LARS gives a layer the velocity u = m u + c lr eta |w| / |g| g and the update w -= u. If successive
gradients have the same direction, |u| tends to lr eta c / (1 - m) |w|, which is the relative step
times |w|. (If they are unrelated, it is lr eta c / sqrt(1 - m^2) |w|.) Apart from the parameters
that LARS does not scale, learning rate, trust coefficient and momentum act only through it, so it
compares settings of different form.
"""

from __future__ import annotations

import math
from typing import Any

LAMB_STEP = 0.04
LAMB_BATCH = 32768
"""LAMB's learning rate for ResNet-50 at that batch (You et al., arXiv 1904.00962).

From a batch of 512 on it follows the square root.
"""
TOLERATED_FACTOR = 4.0
"""A relative step that differs from the tuned one by more than this factor deserves a warning."""


def gradient_factor(handover: str | None, momentum: Any) -> Any:
    """Returns c, the factor of the gradient in the velocity of LARS.

    Args:
      handover: Handover of hybrid, whose velocity remains an average of gradients if it is
        "continuous"; None for other optimizers, whose velocity is a sum.
      momentum: Momentum m, in [0, 1); a number or a tensor.
    """
    return 1.0 - momentum if handover == "continuous" else 1.0


def relative_step(learning_rate: float, eta: float, momentum: float, factor: float = 1.0) -> float:
    """Returns lr * eta * c / (1 - m).

    Args:
      learning_rate: Global learning rate of the step.
      eta: Trust coefficient.
      momentum: Momentum m, in [0, 1).
      factor: C, see `gradient_factor`.
    """
    return learning_rate * eta * factor / (1 - momentum)


def trust_coefficient(
    step: float, learning_rate: float, momentum: float, factor: float = 1.0
) -> float:
    """Returns the trust coefficient that gives a relative step.

    Args:
      step: The wanted relative step.
      learning_rate: See `relative_step`.
      momentum: See `relative_step`.
      factor: See `relative_step`.
    """
    return step / relative_step(learning_rate, 1.0, momentum, factor)


def published_lamb_step(batch: float) -> float:
    """Returns the peak learning rate of LAMB at a batch, 0.04 sqrt(B / 32768).

    It is LAMB's relative step.
    """
    return LAMB_STEP * math.sqrt(batch / LAMB_BATCH)


def is_far_from(step: float, reference_step: float) -> bool:
    """Returns whether two relative steps differ by more than `TOLERATED_FACTOR`."""
    ratio = step / reference_step
    return not 1 / TOLERATED_FACTOR <= ratio <= TOLERATED_FACTOR
