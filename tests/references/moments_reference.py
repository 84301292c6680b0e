"""Oracle for merged moments: the definition for all values at once, in exact arithmetic."""

from fractions import Fraction

import numpy as np


def population_moments(parts):
    """Returns mean and biased variance of the values of all parts, which are lists of floats."""
    values = [Fraction(value) for part in parts for value in part]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return float(mean), float(variance)


def merged(means, variances):
    """Returns mean and biased variance of parts of one size: [parts, ...] gives [...].

    It uses the law of total variance.
    """
    return np.mean(means, 0), np.mean(variances, 0) + np.var(means, 0)
