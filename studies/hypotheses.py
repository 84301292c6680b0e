"""Tests a mean difference between paired runs: better, or as good as.

Both tests can be corrected for several statements.

A difference is an `Estimate` over seeds; its values are taken to be normally distributed. A p value
is the probability of a difference at least as clear as the one seen if the statement were false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from studies.statistics import Estimate

LEVEL = 0.05
"""Statements are accepted whose p value, corrected for the number of statements, is at most
this.
"""
POWER = 0.8
"""`seeds_needed` asks for so large a chance of a decision."""
MOST_SEEDS = 10_000


def p_above(found: Estimate | None, bound: float = 0.0) -> float:
    """Returns the p value of "the mean is above `bound`" by Student's one-sided test.

    It is 1 if there are too few values, or all are equal.
    """
    return _tail(found, bound, 1.0)


def p_below(found: Estimate | None, bound: float = 0.0) -> float:
    """Returns the p value of "the mean is below `bound`"; see `p_above`."""
    return _tail(found, bound, -1.0)


def p_within(found: Estimate | None, margin: float) -> float:
    """Returns p of "the mean is within +- `margin`", the larger p of two one-sided tests.

    Reference:
      Schuirmann (1987), two one-sided tests (TOST).
    """
    return max(p_above(found, -margin), p_below(found, margin))


def p_outside(found: Estimate | None, margin: float) -> float:
    """Returns p of "the mean is outside +- `margin`", twice the smaller p of the two tails."""
    return min(1.0, 2.0 * min(p_above(found, margin), p_below(found, -margin)))


def p_shares(hits: int, runs: int, other_hits: int, other_runs: int) -> float:
    """Returns the two-sided p of "the shares of two sets of runs differ" (Fisher's exact test)."""
    from scipy import stats

    table = [[hits, runs - hits], [other_hits, other_runs - other_hits]]
    return float(stats.fisher_exact(table).pvalue)


def _tail(found: Estimate | None, bound: float, sign: float) -> float:
    if found is None or not found.deviation:
        return 1.0
    from scipy import stats

    t = (found.mean - bound) * math.sqrt(found.count) / found.deviation
    return float(stats.t.sf(sign * t, found.count - 1))


def holm(values: Sequence[float]) -> list[float]:
    """Returns p values corrected for their number (Holm 1979), in the order given.

    Accepting those that are at most a level keeps the chance of any false acceptance below that
    level: the k-th smallest of n is multiplied by n - k + 1, and none comes out below a smaller
    one.
    """
    corrected = [0.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = largest
    return corrected


def power_above(mean: float, deviation: float, count: int, level: float = LEVEL) -> float:
    """Returns the chance that `p_above(..., 0)` is at most `level` with `count` runs.

    Args:
      mean: The true mean.
      deviation: Standard deviation of a run.
      count: Number of runs.
      level: The level of the test.
    """
    from scipy import stats

    limit = stats.t.ppf(1.0 - level, count - 1)
    return _number(stats.nct.sf(limit, count - 1, mean * math.sqrt(count) / deviation))


def power_within(
    mean: float, deviation: float, count: int, margin: float, level: float = LEVEL
) -> float:
    """A lower bound on the chance that `p_within` is at most `level`, if the true mean is `mean`.

    The two tests' powers together, minus 1: exact but for the correlation of the two.
    """
    upper = power_above(mean + margin, deviation, count, level)
    lower = power_above(margin - mean, deviation, count, level)
    return max(0.0, upper + lower - 1.0)


def _number(value: float) -> float:
    """Returns a chance of scipy, or 0 if it is not a number.

    scipy returns no number where a noncentral t is far out. There the chance is 0 or 1 in all
    digits.
    """
    return float(value) if math.isfinite(value) else 0.0


def seeds_needed(power: Callable[[int], float]) -> int | None:
    """The smallest number of seeds with `power(seeds)` at least POWER; None above MOST_SEEDS."""
    high = 2
    while power(high) < POWER:
        if high >= MOST_SEEDS:
            return None
        high = min(2 * high, MOST_SEEDS)
    low = max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle) >= POWER:
            high = middle
        else:
            low = middle
    return high
