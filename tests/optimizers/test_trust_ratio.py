"""The trust ratios of LARS and LARC."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_imagenet.optimizers.trust_ratio import clip_ratio, trust_ratio
from tests.references.optimizers_reference import lars_ratio

NORMS = st.floats(1e-6, 1e6)


@given(
    NORMS,
    NORMS,
    st.sampled_from([0.0, 1e-4, 0.1]),
    st.sampled_from(["add", "floor"]),
    st.sampled_from([0, 1e-6, 1]),
)
def test_trust_ratio_equals_the_formula(weight, grad, decay, rule, eps):
    ratio = trust_ratio(
        np.array([weight]), np.array([grad]), eta=0.01, decay=decay, eps=eps, eps_rule=rule
    )
    expected = lars_ratio(np.array([weight]), np.array([grad]), 0.01, decay, eps, rule)
    assert ratio[0] == pytest.approx(expected, rel=1e-12)


def test_trust_ratio_of_zero_norms_is_one_without_a_warning():
    with np.errstate(all="raise"):
        ratio = trust_ratio(np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0]), decay=0.0)
    np.testing.assert_array_equal(ratio, [1, 1, 1])


def test_clip_ratio_limits_the_rate_to_the_global_learning_rate():
    np.testing.assert_allclose(clip_ratio(np.array([0.05, 0.2]), 0.1), [0.5, 1.0])
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(clip_ratio(np.array([0.05]), 0.0), [1.0])
