"""Gives the random layers of a model, such as dropout, a different seed on each rank."""

from __future__ import annotations

import keras

# Keras takes seeds modulo 2^31 - 2; multiples of this number keep those of different ranks apart.
_RANK_SEED_STRIDE = 0x9E3779B9


def random_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the state of each `keras.random.SeedGenerator` in a model, nested ones included.

    A state is a seed and a counter, int64 [2].
    """
    states = {id(v): v for v in model.variables if v.name == "seed_generator_state"}
    return list(states.values())


def set_rank_seeds(model: keras.Model, rank: int) -> None:
    """Gives the random layers of a model a different seed on each rank.

    Call it after each broadcast of rank 0's random states, because it adds to them. Rank 0 keeps
    its seeds, which checkpoints store.
    """
    for state in random_states(model):
        state.assign_add([rank * _RANK_SEED_STRIDE, 0])
