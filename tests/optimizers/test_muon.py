"""Muon follows an oracle written from its author's description."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.optimizers.muon import Muon, orthogonalized
from tests.optimizers.support import Problem, Runner, follow, one_kernel_runner
from tests.references.optimizers_reference import muon_step, newton_schulz


@pytest.mark.parametrize(
    ("arguments", "loss_scale"),
    [({}, 1.0), ({"nesterov": False, "steps": 3}, 2.0**15)],
)
def test_muon_200_steps_follow_the_oracle(arguments, loss_scale):
    def oracle(layer, grad, step, rate):
        muon_step(layer, grad, rate, 0.9, decay=0.1, **arguments)

    runner = Runner(Muon(0.02, 0.9, weight_decay=0.1, **arguments), Problem(), loss_scale)
    follow(runner, lambda step: 0.02 * (1 - step / 200), oracle)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7)])
def test_orthogonalized_has_singular_values_near_1_in_the_same_directions(shape):
    matrix = np.random.default_rng(0).normal(size=shape)
    result = orthogonalized(tf.constant(matrix, tf.float32), 5).numpy()
    np.testing.assert_allclose(result, newton_schulz(matrix), rtol=1e-4, atol=1e-5)
    values = np.linalg.svd(result, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    assert np.linalg.norm(result - u @ v) < 0.35 * np.linalg.norm(u @ v)


def test_muon_one_step_equals_a_calculation_by_hand():
    # There is one singular value. The direction d = 1.9 g is normalized, so the result is g / |g|
    # times f(f(1)), with f(s) = a s + b s^3 + c s^5.
    runner = one_kernel_runner(Muon(0.1, 0.9, steps=2, weight_decay=0.5), [[1.0], [2.0]])
    runner.step(grads=[np.array([[30.0], [40.0]])])
    s = 1.0
    for _ in range(2):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    np.testing.assert_allclose(
        runner.weights()[0], [[0.95 - 0.06 * s], [1.9 - 0.08 * s]], rtol=1e-5
    )


def test_muon_gradient_of_zero_leaves_only_decay():
    before = np.array([[0.5, -0.3], [0.2, 0.7]])
    runner = one_kernel_runner(Muon(0.5, weight_decay=0.2), before)
    runner.step(grads=[np.zeros((2, 2))])
    np.testing.assert_allclose(runner.weights()[0], 0.9 * before, rtol=1e-6)
