"""Saves and restores values that each rank has for itself, such as statistics inside an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.callbacks import metric_sums
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.models import random_state

Array = npt.NDArray[Any]
_METRICS = "metrics/"
_RECURRENT = "recurrent/"


def gather_differing(
    variables: Mapping[str, keras.Variable], communicator: Communicator
) -> dict[str, Array]:
    """Returns the values of all ranks, for the variables that differ between them.

    Every rank calls it.

    Args:
      variables: Variables by name, the same names and shapes on all ranks.
      communicator: Connects the ranks.

    Returns:
      Arrays [ranks, ...] by name, with the dtype of the variable.
    """
    if communicator.size == 1 or not variables:
        return {}
    values = {name: np.asarray(variable.numpy()) for name, variable in variables.items()}
    digests = [hashlib.sha256(value.tobytes()).hexdigest() for value in values.values()]
    # After an epoch the values are equal as a rule. With thousands of ranks, the digests of all
    # variables would be many megabytes.
    digest = hashlib.sha256("".join(digests).encode()).hexdigest()
    if len(set(communicator.allgather_object(digest))) == 1:
        return {}
    digests_of_ranks = communicator.allgather_object(digests)
    differing = {}
    for index, (name, value) in enumerate(values.items()):
        if len({row[index] for row in digests_of_ranks}) > 1:
            differing[name] = value
    return gather(differing, communicator)


def gather(values: Mapping[str, Array], communicator: Communicator) -> dict[str, Array]:
    """Returns the values of all ranks, arrays [ranks, ...] by name; every rank calls it.

    Args:
      values: Arrays by name, the same names and shapes on all ranks.
      communicator: Connects the ranks.
    """
    if not values:
        return {}
    content = b"".join(value.tobytes() for value in values.values())
    padding = b"\0" * (-len(content) % 4)
    # Each rank adds its row to zeros. The sum of floats would lose the sign of -0.
    words = np.frombuffer(content + padding, np.int32)
    rows = np.zeros((communicator.size, words.size), np.int32)
    rows[communicator.rank] = words
    total = communicator.allreduce_sum(tf.constant(rows), "values of ranks").numpy()
    content_of_ranks = total.view(np.uint8)
    gathered = {}
    start = 0
    for name, value in values.items():
        part = content_of_ranks[:, start : start + value.nbytes]
        start += value.nbytes
        gathered[name] = np.stack(
            [np.frombuffer(row.tobytes(), value.dtype).reshape(value.shape) for row in part]
        )
    return gathered


def own_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the variables of a model that training may set differently on each rank, by name.

    Among them are the statistics of batch normalization, until the end of an epoch merges them.
    """
    random_ids = {id(state) for state in random_state.random_states(model)}
    variables = [v for v in model.non_trainable_variables if id(v) not in random_ids]
    return {f"model/{number:04d}": variable for number, variable in enumerate(variables)}


def recurrent_states(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states that recurrent layers with `stateful=True` keep, by name.

    They last from batch to batch. Keras counts them neither among the weights of a model nor among
    its variables.
    """
    states: dict[int, keras.Variable] = {}
    for layer in private_api.flatten_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            states |= {id(state): state for state in keras.tree.flatten(layer.states or ())}
    return {f"{_RECURRENT}{number:04d}": state for number, state in enumerate(states.values())}


def restore_recurrent_states(
    model: keras.Model, arrays: Mapping[str, Array], communicator: Communicator
) -> bool:
    """Sets the states of recurrent layers, and returns whether all of them were saved.

    A state has a row for each example of a batch, so one of another batch is not used.

    Args:
      model: The network.
      arrays: Arrays [ranks, ...] by name.
      communicator: Connects the ranks.
    """
    states = recurrent_states(model)
    fits = {
        name: name in arrays and arrays[name].shape == (communicator.size, *state.shape)
        for name, state in states.items()
    }
    for name, state in states.items():
        if fits[name]:
            state.assign(arrays[name][communicator.rank])
    return all(fits.values())


def metric_states(model: keras.Model) -> dict[str, Array]:
    """Returns the states of the metrics of a model on this rank, by name."""
    return {name: np.asarray(variable.numpy()) for name, variable, _ in _metric_variables(model)}


def restore_variables(
    model: keras.Model, arrays: Mapping[str, Array], communicator: Communicator
) -> None:
    """Sets the variables that differed between ranks.

    On a different number of ranks, the ranks take the values in turn, and the end of the epoch
    merges them.

    Args:
      model: The network, which has the values of rank 0.
      arrays: Arrays [ranks, ...] by name, from `gather_differing`.
      communicator: Connects the ranks.
    """
    for name, variable in own_variables(model).items():
        if name in arrays:
            rows = arrays[name]
            variable.assign(rows[communicator.rank % len(rows)])


def restore_metrics(
    model: keras.Model, arrays: Mapping[str, Array], communicator: Communicator
) -> dict[str, Array]:
    """Sets the states of the metrics, so that an epoch continues to count.

    Args:
      model: The network, whose metrics have just been reset.
      arrays: Arrays [ranks, ...] by name.
      communicator: Connects the ranks.

    Returns:
      The arrays of metrics that the first step will create, for `add_metrics`.
    """
    states = {name: rows for name, rows in arrays.items() if name.startswith(_METRICS)}
    for name, variable, is_summable in _metric_variables(model):
        rows = states.pop(name, None)
        if rows is not None and rows.shape[1:] == tuple(variable.shape):
            value = _state_of_rank(rows, communicator, is_summable)
            if value is not None:
                variable.assign(value)
    return states


def add_metrics(
    model: keras.Model, arrays: Mapping[str, Array], communicator: Communicator
) -> None:
    """Adds the states of metrics that the first step has created.

    Args:
      model: The network, after the first step.
      arrays: Arrays [ranks, ...] by name, from `restore_metrics`.
      communicator: Connects the ranks.
    """
    for name, variable, is_summable in _metric_variables(model):
        if name in arrays and is_summable:
            value = _state_of_rank(arrays[name], communicator, is_summable)
            if value is not None:
                variable.assign_add(value)


def _state_of_rank(rows: Array, communicator: Communicator, is_summable: bool) -> Array | None:
    """Returns the state that a rank continues with, or None if it has none.

    On a different number of ranks, rank 0 gets the sum over those that have saved.
    """
    if len(rows) == communicator.size:
        return rows[communicator.rank]
    if communicator.rank == 0 and is_summable:
        return rows.astype(np.float64).sum(axis=0).astype(rows.dtype)
    return None


def _metric_variables(model: keras.Model) -> Iterator[tuple[str, keras.Variable, bool]]:
    """Yields name, variable, and whether it can be summed, for the states of all metrics."""
    # By owner, because the metrics of `compile` do not exist before the first step.
    for owner, metrics in private_api.metrics_by_owner(model).items():
        number = 0
        for metric in metric_sums.single_metrics(metrics):
            is_summable = metric_sums.has_summable_state(metric)
            for variable in metric.variables:
                yield f"{_METRICS}{owner}/{number:04d}", variable, is_summable
                number += 1
