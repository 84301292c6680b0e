"""The callbacks that set the values of each step, and how often they evaluate a schedule."""

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks.step_schedule import StepSchedule

HYBRID = hi.schedules.hybrid(0.4, 4, warmup_epochs=2)


def step_callbacks():
    return [c for c in hi.callbacks.default_callbacks() if isinstance(c, StepSchedule)]


@pytest.mark.parametrize(
    ("inner", "schedule", "start", "expected"),
    [
        (hi.optimizers.Hybrid, HYBRID, 0.0, "AdaBoundBounds"),
        (hi.optimizers.Hybrid, HYBRID, 1.99, "AdaBoundBounds"),
        (hi.optimizers.Hybrid, HYBRID, 2.0, "LARSSchedule"),
        (hi.optimizers.LARS, hi.schedules.cosine(0.1, 4), 0.0, "LARSSchedule"),
        (hi.optimizers.SGD, hi.schedules.cosine(0.1, 4), 0.0, "LearningRateSchedule"),
        (keras.optimizers.Adam, lambda *span: {"learning_rate": 0.1}, 0.0, "LearningRateSchedule"),
    ],
)
def test_step_schedules_of_an_optimizer_have_one_owner_per_step(inner, schedule, start, expected):
    optimizer = hi.DistributedOptimizer(inner(), schedule=schedule)
    owners = [type(c).__name__ for c in step_callbacks() if c.applies_to(optimizer, start)]
    assert owners == [expected]


def test_step_schedule_evaluates_the_schedule_once_per_step():
    spans = []

    def schedule(start, end, global_batch):
        spans.append((start, end))
        return {"learning_rate": 0.1}

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(), schedule=schedule)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(np.ones((4, 1)), np.ones(4), 1, verbose=0, callbacks=hi.callbacks.default_callbacks())
    # The first evaluation is of the last step, when training begins.
    assert spans[1:] == [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)]


@pytest.mark.parametrize(("scheduled", "expected"), [(None, 0.95), (0.8, 0.8)])
def test_step_schedule_without_momentum_keeps_the_momentum_of_the_optimizer(scheduled, expected):
    schedule = hi.schedules.cosine(0.1, 4, momentum=scheduled)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = hi.DistributedOptimizer(hi.optimizers.Muon(), schedule=schedule)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(np.ones((1, 1)), np.ones(1), 1, verbose=0, callbacks=hi.callbacks.default_callbacks())
    momentum = optimizer.inner.hyperparameters["momentum"]
    assert float(momentum) == pytest.approx(expected)
