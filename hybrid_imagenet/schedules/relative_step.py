"""Computes the relative step of LARS: a layer's change per update over the norm of its weights.

LARS gives a layer the velocity u = m u + c lr eta |w| / |g| g and the update w -= u. If successive
gradients point one way, u tends to lr eta c / (1 - m) |w|: the relative step. (For gradients
without relation to each other it is lr eta c / sqrt(1 - m^2).) Learning rate, trust coefficient and
momentum work through it alone, apart from the parameters that LARS leaves out, so that settings of
unlike form can be compared by it.
"""

from __future__ import annotations

import math

import numpy as np

TUNED_STEP, TUNED_BATCH = 0.105, 3264
"""A tuned point of MLPerf; the others lie within a factor of 1.7 of the square-root law through
it.
"""
LAMB_STEP, LAMB_BATCH = 0.04, 32768
"""LAMB's rate for ResNet-50 at that batch (You et al., arXiv 1904.00962); from 512 on it follows
the square root.
"""
TOP1_BY_SHARE = (
    *(
        (0.0033, 0.761),
        (0.0294, 0.751),
        (0.0816, 0.731),
        (0.160, 0.691),
        (0.265, 0.640),
        (0.395, 0.590),
    ),
    *((0.552, 0.523), (0.735, 0.425), (0.941, 0.324)),
)
"""Top-1 on ImageNet by the relative step as a share of the tuned one: NVIDIA's log of MLPerf v2.0,
batch 3,264.
"""
FORECAST_BATCHES = (408, 67456)
"""The smallest and the largest batch of the logs that the forecast was tested on."""
TOLERATED_FACTOR = 4.0
"""A relative step further than this from the tuned one deserves a warning."""


def relative_step(learning_rate: float, eta: float, momentum: float, factor: float = 1.0) -> float:
    """lr * eta * c / (1 - momentum).

    Args:
      learning_rate: global learning rate of the step.
      eta: trust coefficient.
      momentum: m, in [0, 1).
      factor: c, in front of the gradient in the velocity: 1 in classical momentum, 1 - m in an
        average.
    """
    return learning_rate * eta * factor / (1 - momentum)


def tuned(batch: float) -> float:
    """The relative step of tuned LARS at a batch, 0.105 sqrt(B / 3264): at the peak of the learning
    rate.

    MLPerf's ten points from 1632 to 67840 images (`schedules.mlperf`) follow it within a factor of
    1.7.
    """
    return TUNED_STEP * math.sqrt(batch / TUNED_BATCH)


def published_lamb(batch: float) -> float:
    """The rate of LAMB at a batch, 0.04 sqrt(B / 32768), which is its relative step: at the
    peak.
    """
    return LAMB_STEP * math.sqrt(batch / LAMB_BATCH)


def forecast_top1(step: float, batch: float) -> float | None:
    """Validation top-1 of ResNet-50 on ImageNet while LARS trains at a relative step, a fraction up
    to 0.761.

    It follows the step over the square root of the batch, not the epoch: docs/dev/forecast.md has
    the test on 23 logs of 14 other batches. None for a batch outside of theirs.
    """
    if not FORECAST_BATCHES[0] <= batch <= FORECAST_BATCHES[1]:
        return None
    shares, top1 = zip(*TOP1_BY_SHARE, strict=True)
    return float(np.interp(math.log(max(step / tuned(batch), shares[0])), np.log(shares), top1))


def far_off(step: float, wanted: float) -> bool:
    """Whether a relative step is more than `TOLERATED_FACTOR` from the wanted one, either way."""
    ratio = step / wanted
    return not 1 / TOLERATED_FACTOR <= ratio <= TOLERATED_FACTOR
