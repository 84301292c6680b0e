"""Random number generators of a network on each rank."""

import keras
import numpy as np

from hybrid_imagenet.models import random_state


class Noise(keras.layers.Layer):
    """Adds noise from a generator that other layers may share."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator)


def test_set_rank_seeds_changes_each_generator_of_nested_layers_once():
    inner = keras.Sequential([keras.Input((8,)), keras.layers.GaussianNoise(1.0, seed=3)])
    shared = keras.random.SeedGenerator(5, name="shared")
    model = keras.Sequential([keras.Input((8,)), inner, Noise(shared), Noise(shared)])
    rank_0 = [state.numpy() for state in random_state.random_states(model)]
    assert sorted(value[0] for value in rank_0) == [3, 5]
    random_state.set_rank_seeds(model, 0)
    for state, value in zip(random_state.random_states(model), rank_0, strict=True):
        np.testing.assert_array_equal(state.numpy(), value)
    random_state.set_rank_seeds(model, 2)
    differences = [
        state.numpy() - value
        for state, value in zip(random_state.random_states(model), rank_0, strict=True)
    ]
    np.testing.assert_array_equal(differences[0], differences[1])
    assert differences[0][0] > 0
    assert differences[0][1] == 0
