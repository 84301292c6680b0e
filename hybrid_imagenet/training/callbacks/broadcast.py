"""Gives every rank the initial state of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import SharedError


class Broadcaster(Protocol):
    """The part of a communicator that this callback uses."""

    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        """Overwrites the variables with the values of rank `root`."""


class BroadcastInitialState(keras.callbacks.Callback):
    """Sends weights, optimizer state and BN statistics of rank 0 to all ranks at the start (Lu et al. §2.2.3).

    Without arguments it is for `model.fit`: it builds the optimizer, sends the model's weights, the optimizer's state
    and the epoch to begin with, which a callback of rank 0 may have restored, and checks that all ranks have as many
    steps.
    """

    def __init__(
        self,
        communicator: Broadcaster | None = None,
        variables: Callable[[], Sequence[keras.Variable]] | None = None,
    ):
        """Takes `variables`, which lists all to send, in the same order on every rank; by default the model's."""
        super().__init__()
        self._communicator = communicator
        self._variables = variables

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the variables.

        Raises:
          UserError: on all ranks, if they have different numbers of steps.
        """
        if self._variables is not None:
            ranks = self._communicator or process.current()
            ranks.broadcast_variables([v.value for v in self._variables()])
            return
        communicator = process.current()
        steps = communicator.allgather_object((self.params or {}).get("steps"))
        if len(set(steps)) > 1:
            raise SharedError(
                f"the ranks have different numbers of steps per epoch ({', '.join(map(str, steps))}), so that some "
                "would wait for ever: share the data with hybrid_imagenet.data.shard, or give steps_per_epoch"
            )
        broadcast(self.model, communicator)


def broadcast(model: keras.Model, communicator: Communicator | None = None) -> None:
    """Gives every rank the weights of rank 0, its optimizer's state, and the epoch with which `fit` begins.

    Random state, such as dropout's, stays each rank's own. Every rank calls it.

    Args:
      model: built; compiled or not.
      communicator: the ranks; by default those of this process.

    Raises:
      UserError: if the model has no weights yet.
    """
    communicator = communicator or process.current()
    variables = list(model.weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += _state(model, optimizer, communicator)
    communicator.broadcast_variables([v.value for v in variables])
    model._initial_epoch = communicator.broadcast_object(getattr(model, "_initial_epoch", None))


def _state(model: keras.Model, optimizer: Any, communicator: Communicator) -> list[keras.Variable]:
    """Builds the optimizer on every rank and returns its variables; its scalars are sent at once."""
    attach = getattr(optimizer, "attach", None)
    if attach is not None:
        attach(model)
    elif not optimizer.built:
        optimizer.build(model.trainable_variables)
    inner = getattr(optimizer, "inner", None)
    hyper = getattr(inner, "hyper", None)
    if inner is not None and hyper is not None:
        hyper.assign(communicator.broadcast_object({name: hyper[name] for name in hyper.names}))
    return list(optimizer.variables)
