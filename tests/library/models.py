"""A small model and its data."""

import keras
import numpy as np

# Examples in a batch of one rank.
BATCH = 4
# Steps in an epoch.
STEPS = 4


def plain(seed):
    """Returns a network of two dense layers that is not compiled."""
    init = [keras.initializers.GlorotUniform(seed + i) for i in range(2)]
    first = keras.layers.Dense(5, "tanh", kernel_initializer=init[0])
    last = keras.layers.Dense(3, kernel_initializer=init[1], dtype="float32")
    return keras.Sequential([keras.Input((6,)), first, last])


def compiled(optimizer, seed=3, **arguments):
    """Returns the network of `plain`, compiled."""
    model = plain(seed)
    model.compile(optimizer, loss(), **arguments)
    return model


def vectors(count):
    """Returns `count` inputs [count, 6] and their classes [count]."""
    random = np.random.default_rng(5)
    return random.normal(size=(count, 6)).astype(np.float32), random.integers(0, 3, count).astype(
        np.int32
    )


def data(size):
    """Returns inputs and classes for STEPS steps of `size` ranks."""
    return vectors(BATCH * STEPS * size)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
