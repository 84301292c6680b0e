"""Merges the mean and variance of equal parts of a population."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def merge_moments(means: ArrayLike, variances: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Computes mean and biased variance of a population from the moments of its equally large parts (Lu et al. §2.2.3).

    mu = mean_i(mu_i) and sigma^2 = mean_i(E[x^2]_i) - mu^2 with E[x^2]_i = sigma_i^2 + mu_i^2. The mean of the parts'
    variances alone would leave out the variance between their means.

    Args:
      means: [parts, ...], one mean per part.
      variances: biased variances of the same shape.

    Returns:
      Mean and variance of shape [...], in the type of the means; the variance is clamped at 0, under which rounding
      can bring it.

    Raises:
      ValueError: if the shapes differ or there is no part.
    """
    means, variances = np.asarray(means), np.asarray(variances)
    if means.shape != variances.shape or means.ndim == 0 or len(means) == 0:
        raise ValueError(f"means {means.shape} and variances {variances.shape} must have one entry per part")
    mean = np.mean(means, axis=0)
    return mean, biased_variance(mean, np.mean(second_moment(means, variances), axis=0))


def second_moment(mean: Any, variance: Any, xp: Any = np) -> Any:
    """E[x^2] from mean and biased variance; arrays, or tensors with `xp` tensorflow."""
    return variance + xp.square(mean)


def biased_variance(mean: Any, square: Any, xp: Any = np) -> Any:
    """Biased variance from E[x] and E[x^2], clamped at 0; arrays, or tensors with `xp` tensorflow."""
    return xp.maximum(square - xp.square(mean), 0.0)
