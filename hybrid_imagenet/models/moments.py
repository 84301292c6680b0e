"""Merges the mean and variance of equal parts of a population, through E[x^2] (Lu et al. §2.2.3).

mu = mean_i(mu_i) and sigma^2 = mean_i(E[x^2]_i) - mu^2 with E[x^2]_i = sigma_i^2 + mu_i^2. The mean
of the parts' variances alone would omit the variance between their means.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def second_moment(mean: Any, variance: Any, xp: Any = np) -> Any:
    """E[x^2] from mean and biased variance; arrays, or tensors with `xp` tensorflow."""
    return variance + xp.square(mean)


def biased_variance(mean: Any, square: Any, xp: Any = np) -> Any:
    """Biased variance from E[x] and E[x^2], clamped at 0; arrays, or tensors with `xp`
    tensorflow.
    """
    return xp.maximum(square - xp.square(mean), 0.0)
