"""The relative step of LARS, and the trust coefficient for a given step."""

import numpy as np
import pytest

from hybrid_imagenet.schedules.relative_step import (
    is_far_from,
    relative_step,
    trust_coefficient,
)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.951807])
@pytest.mark.parametrize("averaged", [False, True])
def test_relative_step_is_the_change_of_a_layer_relative_to_its_norm(momentum, averaged):
    """Runs algorithm 1 of You et al. with constant weights until the velocity is constant."""
    random = np.random.default_rng(0)
    weights = random.normal(size=50)
    gradient = random.normal(size=50)
    lr = 17.0
    eta = 0.001
    factor = 1 - momentum if averaged else 1.0
    local = eta * np.linalg.norm(weights) / np.linalg.norm(gradient)
    velocity = np.zeros(50)
    for _ in range(1000):
        velocity = momentum * velocity + factor * lr * local * gradient
    moved = np.linalg.norm(velocity) / np.linalg.norm(weights)
    assert relative_step(lr, eta, momentum, factor) == pytest.approx(moved)


def test_relative_step_of_published_settings_is_as_recorded():
    assert relative_step(10.5, 0.001, 0.9) == pytest.approx(0.105)
    assert relative_step(24.699, 0.001, 0.951807) == pytest.approx(0.5125, abs=1e-4)
    # These are the values of Lu et al.: lr N = 2.4, eta = 0.001, and an averaged velocity.
    assert relative_step(2.4, 0.001, 0.9, 0.1) == pytest.approx(0.0024)


def test_trust_coefficient_gives_the_relative_step():
    coefficient = trust_coefficient(0.105, 10.5, 0.9)
    assert coefficient == pytest.approx(0.001)
    averaged = trust_coefficient(0.144, 2.4, 0.9, 0.1)
    assert relative_step(2.4, averaged, 0.9, 0.1) == pytest.approx(0.144)


def test_is_far_from_beyond_a_factor_of_4():
    assert [is_far_from(0.105 * times, 0.105) for times in (0.249, 0.251, 1, 3.99, 4.01)] == [
        True,
        False,
        False,
        False,
        True,
    ]
