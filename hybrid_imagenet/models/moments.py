"""Converts between the variance and the second moment, to merge statistics of groups.

Mean and variance of a population that consists of equal groups i are (Lu et al. §2.2.3)

    mu = mean_i(mu_i),   sigma^2 = mean_i(E[x^2]_i) - mu^2,   E[x^2]_i = sigma_i^2 + mu_i^2.

The mean of the groups' variances would omit the variance between their means.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def second_moment(mean: Any, variance: Any, xp: Any = np) -> Any:
    """Returns E[x^2].

    Args:
      mean: E[x], an array or tensor of any shape.
      variance: Biased variance, of the same shape.
      xp: Module with the operations: numpy for arrays, tensorflow for tensors.
    """
    return variance + xp.square(mean)


def biased_variance(mean: Any, square: Any, xp: Any = np) -> Any:
    """Returns the biased variance, clamped at 0, which rounding might cross.

    Args:
      mean: E[x], an array or tensor of any shape.
      square: E[x^2], of the same shape.
      xp: Module with the operations: numpy for arrays, tensorflow for tensors.
    """
    return xp.maximum(square - xp.square(mean), 0.0)
