import numpy as np
import pytest

from hybrid_imagenet.schedules.relative_step import (
    forecast_top1,
    is_far_from,
    relative_step,
    trust_coefficient,
    tuned_step_law,
)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.951807])
@pytest.mark.parametrize("averaged", [False, True])
def test_relative_step_is_the_change_of_a_layer_over_its_norm_for_equal_gradients(
    momentum, averaged
):
    """You et al., algorithm 1, until the velocity is constant; the weights do not change."""
    random = np.random.default_rng(0)
    weights, gradient = random.normal(size=50), random.normal(size=50)
    lr, eta, factor = 17.0, 0.001, 1 - momentum if averaged else 1.0
    local = eta * np.linalg.norm(weights) / np.linalg.norm(gradient)
    velocity = np.zeros(50)
    for _ in range(1000):
        velocity = momentum * velocity + factor * lr * local * gradient
    moved = np.linalg.norm(velocity) / np.linalg.norm(weights)
    assert relative_step(lr, eta, momentum, factor) == pytest.approx(moved)


def test_published_settings_have_the_relative_steps_of_the_record():
    assert relative_step(10.5, 0.001, 0.9) == pytest.approx(0.105)
    assert relative_step(24.699, 0.001, 0.951807) == pytest.approx(0.5125, abs=1e-4)
    # Lu et al. with lr N = 2.4, eta = 0.001 and an averaged velocity.
    assert relative_step(2.4, 0.001, 0.9, 0.1) == pytest.approx(0.0024)


def test_trust_coefficient_gives_the_relative_step():
    coefficient = trust_coefficient(0.105, 10.5, 0.9)
    assert coefficient == pytest.approx(0.001)
    averaged = trust_coefficient(0.144, 2.4, 0.9, 0.1)
    assert relative_step(2.4, averaged, 0.9, 0.1) == pytest.approx(0.144)


def test_tuned_steps_grow_with_the_square_root_of_the_batch():
    assert tuned_step_law(3264) == 0.105
    assert tuned_step_law(6144) == pytest.approx(0.144, abs=5e-4)
    assert tuned_step_law(4 * 3264) == pytest.approx(0.21)


def test_is_far_from_beyond_a_factor_of_4():
    assert [is_far_from(0.105 * times, 0.105) for times in (0.249, 0.251, 1, 3.99, 4.01)] == [
        True,
        False,
        False,
        False,
        True,
    ]


LOGS = {
    "NVIDIA, 2 A30": (
        408,
        3.0,
        2,
        37,
        0.9,
        {15: 62.4, 19: 67.7, 23: 71.2, 27: 74.1, 31: 75.3, 35: 76.0},
    ),
    "Dell, 8 A30": (
        1024,
        5.05,
        2,
        37,
        0.9,
        {15: 62.4, 19: 66.6, 23: 71.1, 27: 73.9, 31: 75.6, 35: 76.1},
    ),
    "CASIA, 16 A100": (
        4096,
        12.0,
        2,
        37,
        0.9,
        {16: 57.9, 20: 66.0, 24: 70.9, 28: 73.1, 32: 75.4, 36: 76.1},
    ),
    "Graphcore, pod 256": (
        10240,
        20.2,
        2,
        45,
        0.9,
        {21: 60.7, 25: 65.2, 29: 69.0, 33: 72.5, 37: 74.5, 41: 75.6},
    ),
    "Dell, 128 A100": (
        16384,
        22.0,
        9,
        48,
        0.9,
        {27: 63.1, 31: 68.5, 35: 71.2, 39: 74.1, 43: 75.4, 47: 76.2},
    ),
    "NVIDIA, 1,024 A100": (
        35840,
        21.9,
        17,
        60,
        0.94,
        {36: 63.9, 40: 68.0, 44: 70.6, 48: 73.3, 52: 74.8, 56: 76.0},
    ),
    "NVIDIA, 4,216 A100": (
        67456,
        24.699,
        31,
        90,
        0.951807,
        {58: 65.4, 66: 70.4, 74: 73.8, 78: 74.6, 86: 76.2},
    ),
}
"""Logs of MLPerf v2.0, result_0.

Batch, peak learning rate, warmup epochs, all epochs, momentum, top-1 by epoch.
"""


@pytest.mark.parametrize("log", LOGS)
def test_forecast_top1_holds_for_logs_of_other_batches(log):
    batch, peak, warmup, end, momentum, top1 = LOGS[log]
    for epoch, measured in top1.items():
        rate = peak * (1 - (epoch - warmup) / (end - warmup)) ** 2  # decay by power 2
        forecast = 100 * forecast_top1(relative_step(rate, 0.001, momentum), batch)
        tolerance = 4.0
        if forecast >= 74:
            tolerance = 0.5
        elif forecast >= 70:
            tolerance = 1.6
        assert abs(forecast - measured) < tolerance, (epoch, forecast, measured)


def test_forecast_top1_outside_of_the_logs_is_none():
    assert forecast_top1(0.1, 300) is forecast_top1(0.1, 70_000) is None
