"""The bounds of the steps of AdaBound and the hybrid method."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_imagenet.schedules.step_bounds import adabound_bounds, hybrid_bounds
from tests.references.optimizers_reference import lu_bounds, luo_bounds

CLUSTER_1 = [(1, 0.24, 902.4), (5, 1.2, 102.4), (9, 2.16, 13.511111), (10, 2.4, 2.4)]


@pytest.mark.parametrize(("t", "lower", "upper"), CLUSTER_1)
def test_hybrid_bounds_on_cluster_1_equal_a_calculation_by_hand(t, lower, upper):
    assert hybrid_bounds(t, 10, 2.4) == pytest.approx((lower, upper), rel=1e-6)


@given(st.floats(1e-3, 1), st.floats(0.5, 40), st.floats(0.01, 60))
def test_hybrid_bounds_equal_the_papers_formula_and_never_cross(part, warmup, peak):
    lower, upper = hybrid_bounds(part * warmup, warmup, peak)
    assert lower <= upper
    expected = lu_bounds(part * warmup, warmup, peak)
    assert lower == pytest.approx(expected[0], rel=1e-12)
    assert upper == pytest.approx(expected[1], rel=1e-9)


@given(st.integers(1, 2000), st.integers(1, 30), st.floats(0.01, 60))
def test_hybrid_bounds_in_float32_never_cross(steps, warmup, peak):
    for step in (steps * warmup - 1, steps * warmup):
        lower, upper = hybrid_bounds(step / steps, warmup, peak)
        assert np.float32(lower) <= np.float32(upper)


def test_hybrid_bounds_outside_the_warmup_are_constant():
    assert hybrid_bounds(0.0, 10, 2.4) == (0.0, math.inf)
    assert hybrid_bounds(-1.0, 10, 2.4) == (0.0, math.inf)
    assert hybrid_bounds(10.0, 10, 2.4) == (2.4, 2.4)
    assert hybrid_bounds(11.0, 10, 2.4) == (2.4, 2.4)
    assert hybrid_bounds(3.0, 0, 2.4) == (2.4, 2.4)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
def test_adabound_bounds_enclose_the_final_rate_as_in_the_paper(step):
    lower, upper = adabound_bounds(step, 0.1, 1e-3)
    assert (lower, upper) == pytest.approx(luo_bounds(step, 0.1, 1e-3), rel=1e-12)
    assert lower < 0.1 < upper
