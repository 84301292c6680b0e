"""Oracle for merged moments: the definition applied to all the values at once, in exact rational arithmetic."""

from fractions import Fraction


def population_moments(parts):
    """Mean and biased variance of the values of all parts, each a list of floats, as floats."""
    values = [Fraction(value) for part in parts for value in part]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return float(mean), float(variance)
