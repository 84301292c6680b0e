"""Tests means, deviations and intervals."""

import math
import statistics as standard

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from studies.statistics import estimate, quantile, welch


# There is no deadline, because the first value imports SciPy.
@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=8).filter(
        lambda values: min(values) < max(values)
    )
)
def test_estimate_has_mean_deviation_and_interval(values):
    result = estimate(values)
    assert result.count == len(values)
    assert result.mean == pytest.approx(standard.fmean(values), abs=1e-12)
    assert result.deviation == pytest.approx(standard.stdev(values), abs=1e-9)
    half = quantile(len(values) - 1) * standard.stdev(values) / math.sqrt(len(values))
    assert result.high - result.mean == pytest.approx(half, abs=1e-7)
    assert result.mean - result.low == pytest.approx(half, abs=1e-7)


def test_estimate_of_too_few_or_equal_values_has_no_interval():
    assert estimate([]) is None
    one = estimate([0.5])
    assert (one.mean, one.deviation, one.half_width) == (0.5, None, None)
    assert (one.low, one.high) == (-math.inf, math.inf)
    equal = estimate([12.0, 12.0, 12.0])
    assert (equal.mean, equal.deviation, equal.half_width) == (12.0, 0.0, None)


def test_welch_equals_scipy():
    generator = np.random.default_rng(5)
    for sizes, spreads in (((5, 5), (1, 1)), ((3, 12), (0.1, 2)), ((9, 4), (3, 0.5))):
        a, b = (generator.normal(0.8, s, n).tolist() for n, s in zip(sizes, spreads, strict=True))
        result = welch(a, b)
        expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
        assert (result.low, result.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
        assert result.count == min(sizes)
    assert welch([0.5], [0.4, 0.6]) is None
    assert welch([0.5, 0.5], [0.4, 0.4]) is None
    assert welch([0.5, 0.5], [0.4, 0.6]).mean == pytest.approx(0.0)
