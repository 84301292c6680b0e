"""Losses that layers add with a value per example are rejected on several ranks."""

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks.layer_losses import reject_losses_of_several_values
from hybrid_imagenet.errors import SharedError


class AddLoss(keras.layers.Layer):
    """Adds the square of its inputs as a loss: one value, or one for each example."""

    def __init__(self, axis):
        super().__init__(name="endpoint")
        self.axis = axis

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x), axis=self.axis))
        return x


class OwnMean(keras.Model):
    """Takes the mean of the losses itself."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean(y_pred) + sum(keras.ops.mean(loss) for loss in self.losses)


def trained(axis, kind=keras.Model, **arguments):
    """Returns a model after one step."""
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), AddLoss(axis)])
    model = kind(inputs, keras.layers.Dense(1, activity_regularizer="l2")(inner(inputs)))
    model.compile(hi.DistributedOptimizer("sgd"), "mse", **arguments)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_loss_of_a_layer_with_a_value_per_example_is_rejected(run_eagerly):
    model = trained(1, run_eagerly=run_eagerly, jit_compile=False)
    with pytest.raises(SharedError, match=r"'endpoint' adds a loss of the shape \((None|4),\)"):
        reject_losses_of_several_values(model)


def test_losses_of_one_value_and_those_of_an_own_compute_loss_are_accepted():
    reject_losses_of_several_values(trained(None, jit_compile=False))
    reject_losses_of_several_values(trained(1, OwnMean, jit_compile=False))
