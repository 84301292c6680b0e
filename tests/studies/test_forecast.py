"""Tests the forecast of the accuracy on ImageNet against logs of MLPerf."""

import pytest

from hybrid_imagenet import config, run_plan
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.relative_step import relative_step
from studies import forecast
from studies.forecast import forecast_top1

# Logs of MLPerf v2.0, result_0: batch, peak learning rate, warmup epochs, all epochs, momentum, and
# top-1 by epoch.
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


@pytest.mark.parametrize("log", LOGS)
def test_forecast_top1_is_near_the_logs_of_other_batches(log):
    batch, peak, warmup, end, momentum, top1 = LOGS[log]
    for epoch, measured in top1.items():
        # The learning rate decays by power 2.
        rate = peak * (1 - (epoch - warmup) / (end - warmup)) ** 2
        forecast = 100 * forecast_top1(relative_step(rate, 0.001, momentum), batch)
        tolerance = 4.0
        if forecast >= 74:
            tolerance = 0.5
        elif forecast >= 70:
            tolerance = 1.6
        assert abs(forecast - measured) < tolerance, (epoch, forecast, measured)


def test_forecast_top1_outside_the_logs_is_none():
    assert forecast_top1(0.1, 300) is forecast_top1(0.1, 70_000) is None


def test_forecast_of_hybrid_has_75_percent_after_epoch_44(capsys):
    # The step is a fraction of .141 / .144 of the tuned one at T = 10, and falls by .9 per epoch.
    # In the 34th epoch after T it is below .031, where the log has 75 %.
    assert forecast.main(["-np", "24", "--recipe=hybrid"]) == 0
    assert "forecast: 75% after epoch 44\n" in capsys.readouterr().out


def test_forecast_of_a_batch_outside_the_logs_has_no_epochs():
    assert (
        forecast.epochs_to_accuracies(run_plan.make(config.resolve(["--recipe=hybrid"], 1))) == {}
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--model=resnet18",
        "--optimizer=lamb",
        "--optimizer=sgd",
        "--image_size=160",
        "--max_steps=9",
    ],
)
def test_forecast_of_another_training_is_an_error(flag):
    with pytest.raises(UserError, match="The forecast is for ResNet-50"):
        forecast.epochs_to_accuracies(run_plan.make(config.resolve([flag], 24)))


def test_tuned_step_law_grows_with_the_square_root_of_the_batch():
    assert forecast.tuned_step_law(3264) == 0.105
    assert forecast.tuned_step_law(6144) == pytest.approx(0.144, abs=5e-4)
    assert forecast.tuned_step_law(4 * 3264) == pytest.approx(0.21)


def test_tuned_points_follow_the_square_root_law_within_a_factor_of_1_7():
    for point in mlperf.POINTS:
        assert 1 / 1.7 < point.relative_step / forecast.tuned_step_law(point.batch) < 1.7
