"""Computes means, deviations and Student's confidence intervals of a few values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of a mean from a sample, with its confidence interval.

    Attributes:
      count: Values in the sample.
      mean: Their mean.
      deviation: Their standard deviation with n - 1; None for a single value.
      half_width: Half of the confidence interval, t(n - 1) * deviation / sqrt(n); None for a single
        value, and where all values are equal: that says nothing of how far others would lie.
    """

    count: int
    mean: float
    deviation: float | None
    half_width: float | None

    @property
    def low(self) -> float:
        """Lower end of the interval; minus infinity where a single value gives none."""
        return -math.inf if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval; infinity where a single value gives none."""
        return math.inf if self.half_width is None else self.mean + self.half_width


def estimate(values: Sequence[float]) -> Estimate | None:
    """Returns mean and two-sided interval of values, or None for no values.

    The values are taken to be normally distributed.
    """
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(1, mean, None, None)
    if min(values) == max(values):
        return Estimate(count, mean, 0.0, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(count, mean, deviation, quantile(count - 1) * deviation / math.sqrt(count))


def welch(first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """Returns the mean of the first sample minus that of the second, with Welch's interval.

    The interval is two-sided (Biometrika 34, 1947). The samples may differ in size and deviation
    and are not paired. `deviation` is that of one value of each together, `count` the size of the
    smaller. None where a sample has fewer than two values or neither scatters.
    """
    a, b = estimate(first), estimate(second)
    if a is None or b is None or a.deviation is None or b.deviation is None:
        return None
    parts = [each.deviation**2 / each.count for each in (a, b)]  # type: ignore[operator]
    error = math.sqrt(sum(parts))
    if not error:
        return None
    freedom = error**4 / sum(p**2 / (each.count - 1) for p, each in zip(parts, (a, b), strict=True))
    deviation = math.hypot(a.deviation, b.deviation)
    return Estimate(min(a.count, b.count), a.mean - b.mean, deviation, quantile(freedom) * error)


def oscillation(values: Sequence[float]) -> float | None:
    """Returns the oscillation of a curve: the root mean square of its second differences.

    It is 0 for a straight line of any slope, and a bend counts little compared with a zigzag. It is
    None for fewer than 3 values.
    """
    second = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return math.sqrt(math.fsum(d * d for d in second) / len(second)) if second else None


def quantile(freedom: float) -> float:
    """Returns the t for which Student's distribution is in [-t, t] with `CONFIDENCE`.

    Args:
      freedom: Degrees of freedom.
    """
    # scikit-learn requires SciPy. Importing it takes a second.
    from scipy import stats

    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))
