"""Tests the bootstrap over runs and images."""

import numpy as np
import pytest
from scipy import stats

from studies import bootstrap


def test_interval_of_one_run_equals_the_paired_bootstrap_of_scipy():
    generator = np.random.default_rng(0)
    first = generator.random((1, 400)) < 0.9
    second = generator.random((1, 400)) < 0.85
    gain = first[0].astype(float) - second[0]
    expected = stats.bootstrap(
        (gain,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    low, high = bootstrap.interval(first, second, draws=20_000)
    assert low == pytest.approx(expected.low, abs=2e-3)
    assert high == pytest.approx(expected.high, abs=2e-3)


def test_interval_includes_the_variance_of_runs_and_of_images():
    # The variance is near the sum of both: between runs / runs + between images / images.
    generator = np.random.default_rng(2)
    base = generator.random((1, 2000))
    ability = np.array([0.88, 0.9, 0.92, 0.94, 0.86, 0.9, 0.91, 0.89])[:, None]
    first = (base + generator.normal(0, 0.05, (8, 2000))) < ability
    second = (base + generator.normal(0, 0.05, (8, 2000))) < 0.85
    gain = first.astype(float) - second
    runs = np.var(gain.mean(1)) / 8
    images = np.var(gain.mean(0)) / 2000
    low, high = bootstrap.interval(first, second)
    assert (high - low) / (2 * 1.96) == pytest.approx(np.sqrt(runs + images), rel=0.12)
    assert low < gain.mean() < high


def test_interval_of_equal_runs_is_zero_and_of_one_seed_repeats():
    right = np.random.default_rng(3).random((3, 50)) < 0.5
    assert bootstrap.interval(right, right) == (0.0, 0.0)
    assert bootstrap.interval(right, ~right, seed=4) == bootstrap.interval(right, ~right, seed=4)
