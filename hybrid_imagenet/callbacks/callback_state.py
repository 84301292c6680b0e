"""Saves and restores the state of callbacks.

A callback can have two kinds of state: variables on the device, which `TrainingCallback.variables`
returns, and values that JSON can represent, which `state_dict` returns and `load_state_dict` sets.
Keras's own callbacks have none of these methods. Their state is in `STATE_ATTRIBUTES`, and the
weights that `EarlyStopping` remembers are in `best_weights`.
"""

from __future__ import annotations

import collections
import json
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.checkpoints.run_state import without_path
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.errors import SharedError, UserError, pluralize

# Beginning of the names of arrays in checkpoints that belong to callbacks but are not variables.
CALLBACK_ARRAYS = "callbacks/"

# Beginnings of the names that variables of callbacks must not have.
RESERVED_NAMES = ("model/", "optimizer/", "random/", CALLBACK_ARRAYS)

# Attributes in which callbacks of Keras count epochs and remember the best value.
STATE_ATTRIBUTES: Mapping[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}

# End of the names of callbacks that only rank 0 has.
_RANK_ZERO = "@rank0"

_callbacks_of_rank_zero: weakref.WeakSet[keras.callbacks.Callback] = weakref.WeakSet()


def add_callbacks_of_rank_zero(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Remembers callbacks that other ranks do not have."""
    _callbacks_of_rank_zero.update(callbacks)


def saved_variables(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.Variable]:
    """Returns the variables of all callbacks that checkpoints contain, by name.

    Raises:
      UserError: If two variables have the same name for `restore_arrays`, because only one of them
        could be restored, or if a name belongs to something else in a checkpoint.
    """
    variables: dict[str, keras.Variable] = {}
    # By the name without the path, which is all that `restore_arrays` compares in `fit`.
    owners: dict[str, str] = {}
    for callback in callbacks:
        if not isinstance(callback, TrainingCallback):
            continue
        for name, variable in callback.variables().items():
            owner = type(callback).__name__
            short_name = without_path(name)
            if short_name in owners:
                raise UserError(
                    f"{owners[short_name]} and {owner} both save a variable with the name"
                    f" {short_name}, so only one of them could be restored. Let variables() of one"
                    " of them return another name."
                )
            if name.startswith(RESERVED_NAMES):
                raise UserError(
                    f"{owner} saves a variable with the name {name}, which another part of a"
                    " checkpoint uses. Let variables() return another name."
                )
            variables[name] = variable
            owners[short_name] = owner
    return variables


def states_of(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, dict[str, Any]]:
    """Returns the states of `stateful_callbacks` by name, JSON-ready.

    Raises:
      UserError: If `state_dict` of a callback has returned something else.
    """
    states = {}
    for name, callback in stateful_callbacks(callbacks).items():
        state = _state_of(callback)
        try:
            # This also makes a copy, because the thread that writes it runs while training goes on.
            states[name] = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"state_dict() of {type(callback).__name__} has returned a value that JSON cannot"
                f" represent ({error}). Return Python numbers, strings, lists and dictionaries, and"
                " variables from variables()."
            ) from None
    return states


def stateful_callbacks(
    callbacks: Iterable[keras.callbacks.Callback],
) -> dict[str, keras.callbacks.Callback]:
    """Returns the callbacks that have `state_dict` or `STATE_ATTRIBUTES`, by class and number.

    These are Keras's own in `STATE_ATTRIBUTES`, and all that have `state_dict` and
    `load_state_dict` like the modules of PyTorch. Those that only rank 0 has are numbered
    separately, so that the others have the same numbers on all ranks.
    """
    named: dict[str, keras.callbacks.Callback] = {}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for callback in callbacks:
        if not (_attributes(callback) or _has_state_methods(callback)):
            continue
        class_name = type(callback).__name__
        owner = _RANK_ZERO if callback in _callbacks_of_rank_zero else ""
        number = counts[class_name, owner]
        counts[class_name, owner] += 1
        named[f"{class_name}#{number}{owner}"] = callback
    return named


def check_ranks(callbacks: Iterable[keras.callbacks.Callback], communicator: Communicator) -> None:
    """Checks that the states of rank 0 belong to the same callbacks on all ranks.

    Every rank calls it. Rank 0 may have more classes of callbacks than others.

    Raises:
      SharedError: On all ranks, if a rank and rank 0 have different numbers of callbacks of a
        class.
    """
    names = [name for name in stateful_callbacks(callbacks) if not name.endswith(_RANK_ZERO)]
    counts_by_rank = communicator.allgather_object(
        dict(collections.Counter(name.partition("#")[0] for name in names))
    )
    for rank, counts in enumerate(counts_by_rank):
        for class_name, count in counts.items():
            count_on_rank_0 = counts_by_rank[0].get(class_name, 0)
            if count != count_on_rank_0:
                raise SharedError(
                    f"Rank {rank} has {pluralize(count, 'callback')} of the class {class_name}, and"
                    f" rank 0 has {count_on_rank_0}, so it is not known whose state in a checkpoint"
                    " belongs to which. Pass those that only rank 0 has to"
                    " hybrid_imagenet.callbacks.default_callbacks, and the others on every rank."
                )


def _state_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the state, JSON-ready; the weights of `EarlyStopping` are not in it."""
    if _has_state_methods(callback):
        state: dict[str, Any] = callback.state_dict()
        return state
    values = {name: getattr(callback, name, None) for name in _attributes(callback)}
    numbers = {name: None if value is None else float(value) for name, value in values.items()}
    return {**numbers, "monitor": callback.monitor}


def has_other_monitor(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> bool:
    """Returns whether the saved callback of Keras monitored a different value than this one."""
    return (
        bool(_attributes(callback)) and state.get("monitor", callback.monitor) != callback.monitor
    )


def set_state(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Sets the state of a callback, one of those that `states_of` returns."""
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
