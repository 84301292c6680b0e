"""Saves and restores the state of Keras's own callbacks, which Keras does not save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

# Attributes in which callbacks of Keras count epochs and remember the best value.
STATE_ATTRIBUTES: Mapping[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


def stateful_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
) -> dict[str, keras.callbacks.Callback]:
    """Returns the callbacks whose state can be saved, by class and number.

    These are Keras's own in `STATE_ATTRIBUTES`, and all that have `state_dict` and
    `load_state_dict` like the modules of PyTorch.
    """
    named: dict[str, keras.callbacks.Callback] = {}
    for callback in callbacks:
        if not (_attributes(callback) or _has_state_methods(callback)):
            continue
        name = type(callback).__name__
        number = sum(other.partition("#")[0] == name for other in named)
        named[f"{name}#{number}"] = callback
    return named


def state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the state, JSON-ready; the weights of `EarlyStopping` are not in it."""
    if _has_state_methods(callback):
        state: dict[str, Any] = callback.state_dict()
        return state
    values = {name: getattr(callback, name, None) for name in _attributes(callback)}
    return {name: None if value is None else float(value) for name, value in values.items()}


def set_state(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Sets what `state_of` has returned."""
    if _has_state_methods(callback):
        callback.load_state_dict(dict(state))
        return
    for name in _attributes(callback):
        value = state.get(name)
        if value is not None and name != "best":
            value = int(value)
        setattr(callback, name, value)


def best_weights(callback: keras.callbacks.Callback) -> list[np.ndarray]:
    """Returns the weights that `EarlyStopping(restore_best_weights=True)` remembers."""
    weights = getattr(callback, "best_weights", None)
    if not isinstance(callback, keras.callbacks.EarlyStopping) or weights is None:
        return []
    return [np.asarray(weight) for weight in weights]


def _attributes(callback: keras.callbacks.Callback) -> tuple[str, ...]:
    for kind, attributes in STATE_ATTRIBUTES.items():
        if isinstance(callback, kind):
            return attributes
    return ()


def _has_state_methods(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
