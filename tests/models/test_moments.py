"""Merging means and variances."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybrid_imagenet.models import moments
from tests.references.moments_reference import population_moments


def merge(means, variances):
    """Merges moments as `normalization.merge_statistics` does."""
    means = np.asarray(means)
    variances = np.asarray(variances)
    mean = means.mean(axis=0)
    return mean, moments.biased_variance(mean, moments.second_moment(means, variances).mean(axis=0))


VALUES = arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    elements=st.floats(-1e3, 1e3, width=32),
)


@given(VALUES)
def test_merged_moments_equal_the_moments_of_all_values(parts):
    mean, variance = merge(parts.mean(axis=1), parts.var(axis=1))
    expected_mean, expected_variance = population_moments(parts.tolist())
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        variance, expected_variance, rtol=1e-9, atol=1e-9 * (1 + expected_mean**2)
    )


def test_merged_moments_of_channels_are_separate_and_float32():
    means = np.array([[1, 2, 3], [3, 2, 1]], np.float32)
    mean, variance = merge(means, np.ones_like(means))
    assert mean.dtype == variance.dtype == np.float32
    np.testing.assert_array_equal(mean, [2, 2, 2])
    np.testing.assert_array_equal(variance, [2, 1, 2])


def test_biased_variance_made_negative_by_rounding_is_zero():
    mean = np.float32(4097.0)
    square = np.nextafter(np.square(mean), np.float32(0))
    assert square - np.square(mean) < 0
    assert moments.biased_variance(mean, square) == 0
