"""A small model and its data."""

import keras
import numpy as np

BATCH = 4  # of one rank
STEPS = 4  # per epoch


def plain(seed):
    """Two dense layers."""
    init = [keras.initializers.GlorotUniform(seed + i) for i in range(2)]
    first = keras.layers.Dense(5, "tanh", kernel_initializer=init[0])
    last = keras.layers.Dense(3, kernel_initializer=init[1], dtype="float32")
    return keras.Sequential([keras.Input((6,)), first, last])


def made(optimizer, seed=3, **arguments):
    """The model, compiled."""
    model = plain(seed)
    model.compile(optimizer, loss(), **arguments)
    return model


def vectors(count):
    """Inputs and classes."""
    random = np.random.default_rng(5)
    return random.normal(size=(count, 6)).astype(np.float32), random.integers(0, 3, count).astype(
        np.int32
    )


def data(size):
    """Inputs and classes for STEPS steps of `size` ranks."""
    return vectors(BATCH * STEPS * size)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
