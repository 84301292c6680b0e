"""AdaBound follows an oracle written from the paper."""

import numpy as np
import pytest

from hybrid_imagenet.optimizers.adabound import AdaBound
from tests.optimizers.support import Problem, Runner, follow, one_kernel_runner
from tests.references.optimizers_reference import bounded_adam_step, luo_bounds


def test_adabound_200_steps_follow_the_oracle():
    def oracle(layer, grad, step, rate):
        bounds = luo_bounds(step + 1, 0.2 if step < 120 else 0.02, 0.01)
        bounded_adam_step(
            layer, grad, step + 1, rate, *bounds, decay=0.01 if layer["kernel"] else 0.0
        )

    optimizer = AdaBound(2e-3, final_lr=0.2, gamma=0.01, weight_decay=0.01)
    follow(
        Runner(optimizer, Problem(), loss_scale=256.0),
        lambda step: 2e-3 if step < 120 else 2e-4,
        oracle,
    )


def test_adabound_first_step_equals_a_calculation_by_hand():
    # With gamma 1 and t = 1 the bounds are F/2 = 0.1 and 2F = 0.4. m is 0.1 g, and the step size
    # s / sqrt(v) = lr / |g| = 0.002 is raised to the lower bound.
    runner = one_kernel_runner(AdaBound(1e-3, final_lr=0.2, gamma=1.0, weight_decay=0.0), [[1.0]])
    runner.step(grads=[np.array([[0.5]])])
    np.testing.assert_allclose(runner.weights()[0], [[1.0 - 0.1 * 0.05]], rtol=1e-6)


def test_adabound_learning_rate_of_zero_is_rejected():
    with pytest.raises(ValueError, match="learning_rate=0"):
        AdaBound(0.0)
