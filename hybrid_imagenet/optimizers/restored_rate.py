"""Decides with which learning rate and momentum a training continues from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hybrid_imagenet.optimizers.grouped import hyperparameters_of

_NAMES = ("learning_rate", "momentum")


def values_of(optimizer: Any) -> dict[str, float]:
    """Returns the learning rate, and the momentum of an optimizer of this package.

    It is empty if a schedule sets them.

    Args:
      optimizer: Optimizer of this package or of Keras, wrapped or not.
    """
    if getattr(optimizer, "schedule", None) is not None:
        return {}
    hyperparameters = hyperparameters_of(optimizer)
    if hyperparameters is not None:
        return {name: hyperparameters[name] for name in _NAMES}
    rate = getattr(optimizer, "inner", optimizer).learning_rate
    # Otherwise it is a value of `keras.optimizers.schedules`.
    return {"learning_rate": float(rate)} if isinstance(rate, keras.Variable) else {}


def changed_values(
    restored: Mapping[str, float], saved: Mapping[str, float], passed: Mapping[str, float]
) -> dict[str, float]:
    """Returns the values that must differ from those of the checkpoint.

    If the optimizer was created with another learning rate than at the start of the training, such
    as one that follows the number of ranks, the training continues with the new one. A factor by
    which callbacks have changed the rate since then is kept.

    Args:
      restored: Values of the checkpoint.
      saved: Values with which the optimizer was created when the training began.
      passed: Values with which it was created now.
    """
    values = {}
    for name in restored.keys() & saved.keys() & passed.keys():
        if passed[name] == saved[name]:
            continue
        is_scaled = name == "learning_rate" and restored[name] != saved[name] != 0
        factor = restored[name] / saved[name] if is_scaled else 1.0
        values[name] = factor * passed[name]
    return values
