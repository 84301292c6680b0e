"""The exponential moving average of weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.loss_scale import LossScale
from tests.optimizers.support import scaled_sgd
from tests.references.average_reference import averaged


def make(decay, start, every=1, packed=None):
    average = WeightAverage(decay, every)
    variables, _, step = scaled_sgd(start, LossScale(64.0), 0.9, average=average, packed=packed)
    return variables, average, step


@pytest.mark.parametrize(
    ("decay", "every", "packed"),
    [(0.5, 1, False), (0.9999, 1, False), (0.9, 7, False), (0.9, 7, True)],
)
def test_average_200_updates_follow_the_oracle_and_ignore_skipped_steps(decay, every, packed):
    random = np.random.default_rng(1)
    start = [random.normal(size=shape).astype(np.float32) for shape in ((3, 4), (5,))]
    variables, average, step = make(decay, start, every, packed)
    path = [[], []]
    for number in range(220):
        grads = [random.normal(0, 0.1, w.shape).astype(np.float32) for w in start]
        skipped = number % 11 == 5
        step(*(np.full_like(g, np.nan) if skipped else g for g in grads))
        if not skipped:
            for weights, variable in zip(path, variables, strict=True):
                weights.append(variable.numpy())
    assert len(path[0]) == 200
    for first, weights, value in zip(start, path, average.variables, strict=True):
        np.testing.assert_allclose(
            value.numpy(), averaged(first, weights, decay, every), rtol=1e-5, atol=1e-6
        )
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(("every", "packed"), [(1, False), (1, True), (3, True)])
def test_average_of_constrained_weights_follows_the_oracle(every, packed):
    random = np.random.default_rng(1)
    start = random.normal(size=(3, 4)).astype(np.float32)
    (variable,), average, step = make(0.9, [start], every, packed)
    variable.constraint = keras.constraints.NonNeg()
    # A skipped step does not change weights that the constraint has not reached yet.
    step(np.full_like(start, np.nan))
    np.testing.assert_array_equal(variable.numpy(), start)
    path = []
    for _ in range(30):
        step(random.normal(0, 0.5, start.shape).astype(np.float32))
        path.append(variable.numpy())
    assert (path[-1] == 0).any()
    assert (path[-1] > 0).any()
    expected = averaged(start, path, 0.9, every)
    np.testing.assert_allclose(average.variables[0].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_average_exchange_twice_restores_weights_and_averages():
    variables, average, step = make(0.9, [np.ones(3, np.float32)])
    step(tf.constant([1.0, 2.0, 3.0]))
    trained = variables[0].numpy()
    averaged_weights = average.variables[0].numpy()
    average.exchange()
    np.testing.assert_array_equal(variables[0].numpy(), averaged_weights)
    average.exchange()
    np.testing.assert_array_equal(variables[0].numpy(), trained)
    np.testing.assert_array_equal(average.variables[0].numpy(), averaged_weights)
