"""LARS follows an oracle written from the paper."""

import numpy as np
import pytest

from hybrid_imagenet.optimizers.lars import LARS
from tests.optimizers.support import Problem, Runner, follow, one_kernel_runner
from tests.references.optimizers_reference import lars_step

VARIANTS = [
    {},
    {"nesterov": True, "weight_decay": 2e-4},
    {"variant": "larc", "trust_coefficient": 0.02},
    {"trust_coefficient": 0.01, "eps": 1e-6, "eps_rule": "floor"},
    {"eps": 0.5},
    {"eps": 2.0, "eps_rule": "floor"},
]


@pytest.mark.parametrize("arguments", VARIANTS)
def test_lars_200_steps_follow_the_oracle(arguments):
    options = {"weight_decay": 1e-4, "trust_coefficient": 0.001} | arguments
    runner = Runner(LARS(4.0, 0.9, **options), Problem(), loss_scale=512.0)
    options["decay"] = options.pop("weight_decay")

    def oracle(layer, grad, step, rate):
        lars_step(layer, grad, rate, 0.9, **options)

    follow(runner, lambda step: 4.0 * (1 - step / 200) ** 2, oracle)


@pytest.mark.parametrize("arguments", [{}, {"variant": "larc", "trust_coefficient": 0.02}])
def test_lars_kernel_without_decay_follows_the_oracle_with_its_own_coefficient(arguments):
    options = {"trust_coefficient": 0.001} | arguments
    optimizer = LARS(4.0, weight_decay=0.5, **options)
    # The second of the two kernels.
    optimizer.exclude_from_weight_decay(var_names=["w3"])
    problem = Problem()

    def oracle(layer, grad, step, rate):
        is_excluded = layer["w"].shape == problem.start[3].shape
        lars_step(layer, grad, rate, 0.9, decay=0.0 if is_excluded else 0.5, **options)

    follow(Runner(optimizer, problem), lambda step: 4.0 * (1 - step / 200) ** 2, oracle)


def test_lars_one_step_equals_a_calculation_by_hand():
    # With |w| = 5, |g| = 1 and a decay of 0.2, the ratio is 0.001 * 5 / (1 + 1) = 0.0025. So
    # w -= 10 * 0.0025 * (g + 0.2 w).
    runner = one_kernel_runner(LARS(10.0, trust_coefficient=0.001, weight_decay=0.2), [[3.0, 4.0]])
    runner.step(grads=[np.array([[0.6, 0.8]])])
    np.testing.assert_allclose(runner.weights()[0], [[3 - 0.025 * 1.2, 4 - 0.025 * 1.6]], rtol=1e-6)
    np.testing.assert_allclose(
        runner.optimizer.velocity[0].numpy(), [[-0.025 * 1.2, -0.025 * 1.6]], rtol=1e-6
    )
