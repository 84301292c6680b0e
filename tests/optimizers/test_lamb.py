"""LAMB follows an oracle written from the paper."""

import numpy as np
import pytest

from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.lamb import LAMB
from tests.optimizers.support import Problem, Runner, follow, one_kernel_runner
from tests.references.optimizers_reference import lamb_step


@pytest.mark.parametrize(
    ("arguments", "loss_scale"), [({}, 1.0), ({"beta1": 0.8, "beta2": 0.99, "eps": 1e-3}, 2.0**15)]
)
def test_lamb_200_steps_follow_the_oracle(arguments, loss_scale):
    def oracle(layer, grad, step, rate):
        lamb_step(layer, grad, step + 1, rate, decay=0.1, **arguments)

    runner = Runner(LAMB(0.02, weight_decay=0.1, **arguments), Problem(), loss_scale)
    follow(runner, lambda step: 0.02 * (1 - step / 200), oracle)


def test_lamb_one_step_equals_a_calculation_by_hand():
    # In the first step m / 0.1 is the gradient and sqrt(v / 0.001) its absolute value. So
    # r = (1, -1) + 0.5 (3, 4) = (2.5, 1), and |w| = 5.
    runner = one_kernel_runner(LAMB(0.1, eps=1e-12, weight_decay=0.5), [[3.0, 4.0]])
    runner.step(grads=[np.array([[0.25, -8.0]])])
    ratio = 5 / np.hypot(2.5, 1)
    np.testing.assert_allclose(
        runner.weights()[0], [[3 - 0.1 * ratio * 2.5, 4 - 0.1 * ratio]], rtol=1e-6
    )


def test_lamb_relative_step_of_a_layer_is_the_learning_rate():
    runner = Runner(LAMB(0.03), Problem())
    for size in (1e-3, 1.0, 1e3):
        before = runner.weights()
        runner.step(grads=[size * g for g in runner.problem.grads(before, 0)])
        for old, new, kind in zip(before, runner.weights(), runner.optimizer.kinds, strict=True):
            moved = np.linalg.norm(new - old) / np.linalg.norm(old)
            assert (moved == pytest.approx(0.03, rel=1e-4)) == (kind is ParameterKind.KERNEL)


def test_lamb_layer_of_zeros_takes_the_step_of_adam():
    runner = one_kernel_runner(LAMB(0.5, eps=1e-12), np.zeros((2, 2)))
    runner.step(grads=[np.full((2, 2), 0.25)])
    np.testing.assert_allclose(runner.weights()[0], np.full((2, 2), -0.5), rtol=1e-5)
    runner.step({"learning_rate": 0.0})
    np.testing.assert_allclose(runner.weights()[0], np.full((2, 2), -0.5), rtol=1e-5)
