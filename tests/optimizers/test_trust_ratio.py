"""The trust ratios of LARS and LARC."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_imagenet.optimizers.lars import larc_ratio, trust_ratio
from tests.references.optimizers_reference import lars_ratio

NORMS = st.floats(1e-6, 1e6)


# TensorFlow's first operations take longer than Hypothesis allows.
@settings(deadline=None)
@given(
    NORMS,
    NORMS,
    st.sampled_from([0.0, 1e-4, 0.1]),
    st.sampled_from(["add", "floor"]),
    st.sampled_from([0, 1e-6, 1]),
)
def test_trust_ratio_equals_the_formula(weight, grad, decay, rule, eps):
    ratio = trust_ratio(
        tf.constant([weight], tf.float64),
        tf.constant([grad], tf.float64),
        trust_coefficient=0.01,
        decay=decay,
        eps=eps,
        eps_rule=rule,
    )
    expected = lars_ratio(np.array([weight]), np.array([grad]), 0.01, decay, eps, rule)
    assert ratio.numpy()[0] == pytest.approx(expected, rel=1e-12)


def test_trust_ratio_of_zero_norms_is_one():
    weight_norms = tf.constant([0.0, 1.0, 0.0])
    gradient_norms = tf.constant([1.0, 0.0, 0.0])
    ratio = trust_ratio(weight_norms, gradient_norms, trust_coefficient=0.001, decay=0.0)
    np.testing.assert_array_equal(ratio, [1, 1, 1])


def test_larc_ratio_limits_the_rate_to_the_global_learning_rate():
    ratios = larc_ratio(tf.constant([0.05, 0.2]), tf.constant(0.1))
    np.testing.assert_allclose(ratios, [0.5, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(larc_ratio(tf.constant([0.05]), tf.constant(0.0)), [1.0])
