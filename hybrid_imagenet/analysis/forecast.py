"""Forecasts when a run reaches its target from the accuracies so far, and compares with MLPerf's reference.

Late in training the error of a run with a smoothly decaying learning rate falls towards a level:

    accuracy(e) = A - B r^e,    B > 0, 0 < r < 1.

The epoch e* at which this crosses the target replaces A: accuracy(e) = target + K (r^e* - r^e) with K > 0. For each
pair (e*, r) of a grid K follows by least squares, so that the profile of the squared error over e* gives both the
best e* and its band: all e* whose error is at most 1 + t^2 / (n - 3) times the least, with Student's t.

The forecast supposes that training goes on as it has; a learning rate that drops in steps does better than that.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from hybrid_imagenet.analysis import published

MINIMUM_POINTS = 5
_LEFT_OUT = 1 / 3  # of the epochs so far: the warmup, and the steep rise, follow another law
_LEAST_NOISE = 3e-4  # of an accuracy; keeps the band wider than the grid is coarse
_CROSSINGS = 800
_RATES = 600


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The forecast epoch at which the target is met, and its confidence band.

    Attributes:
      epochs: the likeliest epoch, None if accuracy levels off under the target or crosses it beyond the horizon.
      low: the earliest epoch of the band; None if even that lies beyond the horizon.
      high: the latest, None if "not within the horizon" cannot be excluded.
    """

    epochs: float | None
    low: float | None
    high: float | None


def forecast(
    epochs: Sequence[float], accuracies: Sequence[float], target: float, horizon: float, confidence: float = 0.8
) -> Forecast | None:
    """Forecasts the epoch at which the target is met.

    Args:
      epochs: increasing, n values.
      accuracies: after each, fractions.
      target: a fraction.
      horizon: the last epoch that is looked at, such as the run's planned end.
      confidence: of the band.

    Returns:
      The crossing itself if it has happened; None with fewer than five validations after the first third, or at the
      horizon.
    """
    reached = [epoch for epoch, accuracy in zip(epochs, accuracies, strict=True) if accuracy >= target]
    if reached:
        return Forecast(reached[0], reached[0], reached[0])
    x, y = np.asarray(epochs, np.float64), np.asarray(accuracies, np.float64)
    keep = x > _LEFT_OUT * x[-1] if len(x) else slice(0)
    x, y = x[keep], y[keep]
    if len(x) < MINIMUM_POINTS or horizon <= x[-1]:
        return None
    crossings = np.geomspace(x[-1], 4 * horizon, _CROSSINGS)  # past the horizon, to tell "later" from "never"
    errors = _profile(x, y, target, crossings)
    variance = max(errors.min() / (len(x) - 3), _LEAST_NOISE**2)
    limit = errors.min() + variance * student_t(confidence, len(x) - 3) ** 2
    inside = crossings[errors <= limit]
    best = crossings[errors.argmin()]
    return Forecast(*(float(e) if e <= horizon else None for e in (best, inside[0], inside[-1])))


def _profile(x: np.ndarray, y: np.ndarray, target: float, crossings: np.ndarray) -> np.ndarray:
    """The least squared error for each crossing epoch, over the rates r and K > 0."""
    span = x[-1] - x[0]
    constants = np.geomspace(span / 20, 20 * span, _RATES)  # epochs in which the distance to the level falls by e
    # The regressor is c - d with c = r^e* [crossings, rates] and d = r^e [rates, points]; x[0] keeps exponents small.
    c = np.exp(-(crossings[:, None] - x[0]) / constants)
    d = np.exp(-(x - x[0])[None, :] / constants[:, None])
    gap = y - target
    product = c * gap.sum() - d @ gap
    square = len(x) * c**2 - 2 * c * d.sum(axis=1) + (d**2).sum(axis=1)
    k = np.maximum(product / np.maximum(square, 1e-300), 0)
    errors: np.ndarray = (gap @ gap - 2 * k * product + k**2 * square).min(axis=1)
    return np.maximum(errors, 0)


def student_t(confidence: float, degrees: int) -> float:
    """The two-sided quantile of Student's t, by the expansion around the normal one (within 3 % from 2 degrees on)."""
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


@dataclasses.dataclass(frozen=True)
class Gate:
    """A run beside MLPerf's reference convergence at its batch.

    Attributes:
      reference_epochs: the reference's mean epochs to 75.9 %.
      ahead_epochs: reference less forecast; negative when behind; None while there is no forecast.
      verdict: `ahead`, `behind` (the whole band lies on one side), `level`, or `open` without a forecast.
    """

    reference_epochs: float
    ahead_epochs: float | None
    verdict: str


def gate(global_batch: int, prediction: Forecast | None) -> Gate | None:
    """Compares a forecast for 75.9 % top-1 with the reference; None where the reference does not cover the batch."""
    reference = published.reference_epochs(global_batch)
    if reference is None:
        return None
    if prediction is None or (prediction.epochs is None and prediction.low is None):
        return Gate(reference, None, "open" if prediction is None else "behind")
    ahead = None if prediction.epochs is None else reference - prediction.epochs
    if prediction.high is not None and prediction.high <= reference:
        return Gate(reference, ahead, "ahead")
    if prediction.low is not None and prediction.low > reference:
        return Gate(reference, ahead, "behind")
    return Gate(reference, ahead, "level")
