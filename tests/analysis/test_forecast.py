import numpy as np
import pytest
from scipy import stats

from hybrid_imagenet.analysis import forecast

EPOCHS = list(range(1, 31))


def curve(epochs, level=0.78, scale=0.6, rate=0.93):
    return [level - scale * rate**e for e in epochs]


def crossing(target, level=0.78, scale=0.6, rate=0.93):
    return np.log((level - target) / scale) / np.log(rate)


@pytest.mark.parametrize("target", [0.73, 0.75, 0.759])
def test_exact_curve_is_continued_to_its_crossing(target):
    result = forecast.forecast(EPOCHS, curve(EPOCHS), target, horizon=90)
    assert result.epochs == pytest.approx(crossing(target), rel=0.02)
    assert result.low <= result.epochs <= result.high
    assert result.high - result.low < 0.1 * result.epochs


def test_warmup_does_not_bend_the_forecast():
    values = curve(EPOCHS)
    values[:10] = [0.01 * e for e in range(10)]
    assert forecast.forecast(EPOCHS, values, 0.75, 90) == forecast.forecast(EPOCHS, curve(EPOCHS), 0.75, 90)


def test_curve_that_levels_off_under_the_target():
    result = forecast.forecast(EPOCHS, curve(EPOCHS, level=0.70, rate=0.8), 0.75, horizon=90)
    assert (result.epochs, result.high) == (None, None)


def test_target_already_met_is_the_first_epoch_that_met_it():
    values = curve(EPOCHS)
    values[20] = 0.9
    assert forecast.forecast(EPOCHS, values, 0.75, 90) == forecast.Forecast(21, 21, 21)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_few_points_say_nothing(count):
    assert forecast.forecast(EPOCHS[:count], curve(EPOCHS[:count]), 0.75, 90) is None


def test_last_epoch_has_no_forecast():
    assert forecast.forecast(EPOCHS, curve(EPOCHS), 0.759, horizon=30) is None


def test_band_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth, hits, trials = crossing(0.75), 0, 120
    for _ in range(trials):
        noisy = np.array(curve(EPOCHS)) + rng.normal(0, 0.003, len(EPOCHS))
        result = forecast.forecast(EPOCHS, noisy, 0.75, horizon=200)
        hits += result.low <= truth and (result.high is None or truth <= result.high)
    assert 0.70 < hits / trials < 0.92  # 0.8 promised; three standard errors


@pytest.mark.parametrize("degrees", [2, 3, 5, 10, 50])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9])
def test_student_quantile(degrees, confidence):
    assert forecast.student_t(confidence, degrees) == pytest.approx(
        stats.t.ppf((1 + confidence) / 2, degrees), rel=0.03
    )


@pytest.mark.parametrize(
    ("prediction", "verdict", "ahead"),
    [
        (forecast.Forecast(35, 33, 38), "ahead", 5),
        (forecast.Forecast(45, 42, None), "behind", -5),
        (forecast.Forecast(39, 37, 42), "level", 1),
        (forecast.Forecast(None, 50, None), "behind", None),
        (forecast.Forecast(None, None, None), "behind", None),
        (None, "open", None),
    ],
)
def test_gate_at_a_batch_whose_reference_is_40_epochs(prediction, verdict, ahead):
    assert forecast.gate(4096, prediction) == forecast.Gate(40, ahead, verdict)


def test_no_gate_where_the_reference_ends():
    assert forecast.gate(256, None) is None
    assert forecast.gate(70000, None) is None
