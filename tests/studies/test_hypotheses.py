"""Tests the hypothesis tests of the studies against SciPy, tables and simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from studies import hypotheses
from studies.statistics import estimate

SAMPLES = [
    np.random.default_rng(n).normal(0.3 * n - 0.5, 1.0, size)
    for n, size in enumerate((2, 3, 5, 10, 40))
]


@pytest.mark.parametrize("sample", SAMPLES, ids=len)
@pytest.mark.parametrize("bound", [0.0, 0.4])
def test_p_above_and_p_below_equal_scipy(sample, bound):
    result = estimate(sample)
    above = stats.ttest_1samp(sample, bound, alternative="greater").pvalue
    below = stats.ttest_1samp(sample, bound, alternative="less").pvalue
    assert hypotheses.p_above(result, bound) == pytest.approx(above, rel=1e-9)
    assert hypotheses.p_below(result, bound) == pytest.approx(below, rel=1e-9)


@pytest.mark.parametrize("sample", SAMPLES, ids=len)
def test_p_within_is_significant_if_the_90_percent_interval_is_within_the_margin(sample):
    # Schuirmann's two one-sided tests at 5 % are equivalent to the 90 % interval.
    low, high = stats.t.interval(0.9, len(sample) - 1, sample.mean(), stats.sem(sample))
    for margin in (0.1, 0.5, 1.0, 2.0, 5.0, 20.0):
        within = -margin < low and high < margin
        assert (hypotheses.p_within(estimate(sample), margin) <= 0.05) == within
        low95, high95 = stats.t.interval(0.95, len(sample) - 1, sample.mean(), stats.sem(sample))
        assert (hypotheses.p_outside(estimate(sample), margin) <= 0.05) == (
            low95 > margin or high95 < -margin
        )


@pytest.mark.parametrize("values", [[], [0.4], [0.25, 0.25, 0.25]], ids=["none", "one", "equal"])
def test_p_values_without_spread_are_one(values):
    result = estimate(values)
    assert (
        hypotheses.p_above(result)
        == hypotheses.p_within(result, 1.0)
        == hypotheses.p_outside(result, 0.1)
        == 1.0
    )


def test_holm_returns_corrected_p_values():
    # By hand: 0.01 * 4, 0.013 * 3, 0.03 * 2, 0.04 * 1. None may be below a smaller one.
    assert hypotheses.holm([0.04, 0.01, 0.03, 0.013]) == pytest.approx([0.06, 0.04, 0.06, 0.04])
    assert hypotheses.holm([0.5, 0.9]) == [1.0, 1.0]
    assert hypotheses.holm([]) == []


def test_holm_accepts_the_same_as_the_step_down_procedure():
    generator = np.random.default_rng(0)
    for _ in range(200):
        values = generator.uniform(0, 0.1, generator.integers(1, 8)).tolist()
        accepted = set()
        # Holm (1979) stops at the first p-value that is too large.
        for position, index in enumerate(np.argsort(values)):
            if values[index] > 0.05 / (len(values) - position):
                break
            accepted.add(int(index))
        assert {i for i, p in enumerate(hypotheses.holm(values)) if p <= 0.05} == accepted


def test_power_equals_a_simulation():
    generator = np.random.default_rng(1)
    mean = 0.3
    deviation = 0.4
    count = 9
    samples = generator.normal(mean, deviation, (20_000, count))
    t = samples.mean(1) * math.sqrt(count) / samples.std(1, ddof=1)
    hits = np.mean(t > stats.t.ppf(0.95, count - 1))
    assert hypotheses.power_above(mean, deviation, count) == pytest.approx(hits, abs=0.01)
    margin = 0.8
    low = (samples.mean(1) + margin) * math.sqrt(count) / samples.std(1, ddof=1)
    high = (samples.mean(1) - margin) * math.sqrt(count) / samples.std(1, ddof=1)
    limit = stats.t.ppf(0.95, count - 1)
    both = np.mean((low > limit) & (high < -limit))
    power = hypotheses.power_within(mean, deviation, count, margin)
    # The function returns a lower bound.
    assert both - 0.02 < power < both + 0.01


def test_seeds_needed_returns_the_smallest_sufficient_number():
    def power(seeds):
        return hypotheses.power_above(0.3, 0.4, seeds)

    seeds = hypotheses.seeds_needed(power)
    assert power(seeds) >= 0.8 > power(seeds - 1)
    # G*Power returns the same for d = 0.75, one-sided, 5 %, power 0.8.
    assert seeds == 13
    assert hypotheses.seeds_needed(lambda n: 0.79) is None
    assert hypotheses.seeds_needed(lambda n: 1.0) == 2
    assert hypotheses.seeds_needed(lambda n: float(n >= 3)) == 3


def test_p_shares_equals_fishers_exact_test():
    # Fisher's lady tasting tea: 3 of 4 and 1 of 4 of 8 cups, p = 34 / 70.
    assert hypotheses.p_shares(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert hypotheses.p_shares(1, 4, 3, 4) == pytest.approx(34 / 70)
    assert hypotheses.p_shares(4, 4, 4, 4) == 1.0
