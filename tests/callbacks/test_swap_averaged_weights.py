"""Validation under averaged weights, on a small network with dropout."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.callbacks.batch_norm_statistics import BatchNormStatistics, PreciseStatistics
from hybrid_imagenet.callbacks.swap_averaged_weights import SwapAveragedWeights
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.models import normalization
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.training.step import TrainStep
from tests.references.moments_reference import population_moments

BATCHES = [np.random.default_rng(i).normal(size=(6, 4, 4, 3)).astype(np.float32) for i in range(3)]


@pytest.fixture(params=["last", "moving", "moving, 2 virtual GPUs", "Keras's own"])
def setup(request):
    """Returns a model, the callback, the calls of the batches and the state of the run."""
    mode = request.param.partition(",")[0]
    image = keras.Input((4, 4, 3))
    x = keras.layers.Conv2D(5, 1, use_bias=False, name="conv")(image)
    if mode != "Keras's own":
        layer = normalization.BatchNormalization(
            mode=mode, virtual_gpus=2 if "GPUs" in request.param else 1
        )
    else:
        layer = keras.layers.BatchNormalization()
    x = keras.layers.Dropout(0.5, seed=1)(layer(x))
    model = keras.Model(image, x)
    average = WeightAverage(0.9)
    average.build(model.trainable_variables)
    for weight, value in zip(model.trainable_variables, average.variables, strict=True):
        value.assign(2.0 * weight.value + 0.1)
    pairs = normalization.trainable_statistics(model)
    calls = []

    def batches():
        calls.append(len(calls))
        return [{"image": tf.constant(b)} for b in BATCHES]

    state = RunState(step=7)
    trained = types.SimpleNamespace(model=model, _preprocess=lambda batch: batch["image"])
    forward = functools.partial(TrainStep.forward, trained)
    collect = PreciseStatistics(forward, pairs, batches, state).collect
    measure = BatchNormStatistics(SingleProcess(), pairs, collect).synchronize
    callback = SwapAveragedWeights(average, pairs, measure)
    callback.set_model(model)
    return model, callback, calls, state


def test_swap_averaged_weights_validates_averages_and_restores_all_variables(setup):
    model, averaged, calls, state = setup
    before = [v.numpy() for v in model.variables]
    variables = {name.split("/", 2)[2]: v for name, v in averaged.variables().items()}
    averages = {path: v.numpy() for path, v in variables.items()}
    averaged.on_test_begin()
    kernel = averages["conv/kernel"]
    assert [v.path for v in model.trainable_variables] == list(averages)[:3]
    for variable in model.trainable_variables:
        np.testing.assert_array_equal(variable.numpy(), averages[variable.path])
    mean, variance = normalization.trainable_statistics(model)[0]
    outputs = np.concatenate([b @ kernel[0, 0] for b in BATCHES])
    for channel in range(5):
        batches = [part[..., channel].ravel().tolist() for part in np.split(outputs, 3)]
        expected = population_moments(batches)
        np.testing.assert_allclose(
            [mean.numpy()[channel], variance.numpy()[channel]], expected, rtol=1e-5, atol=1e-6
        )
    np.testing.assert_array_equal(variables[mean.path].numpy(), mean.numpy())
    averaged.on_test_end()
    after = [v.numpy() for v in model.variables]
    # These are kernel, gamma, beta, both statistics, and the state of dropout.
    assert len(after) == 6
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    averaged.before_save()
    assert calls == [0]
    state.step += 1
    averaged.on_train_batch_end(0)
    averaged.before_save()
    assert calls == [0, 1]
