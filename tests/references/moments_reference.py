"""Oracle for merged moments: the definition applied to all the values at once, in exact rational
arithmetic.
"""

from fractions import Fraction

import numpy as np


def population_moments(parts):
    """Mean and biased variance of the values of all parts, each a list of floats, as floats."""
    values = [Fraction(value) for part in parts for value in part]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return float(mean), float(variance)


def merged(means, variances):
    """Mean and biased variance of parts of one size, by the law of total variance: [parts, ...]
    gives [...].
    """
    return np.mean(means, 0), np.mean(variances, 0) + np.var(means, 0)
