"""Gives every rank the initial state of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf


class Broadcaster(Protocol):
    """The part of a communicator that this callback uses."""

    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        """Overwrites the variables with the values of rank `root`."""


class BroadcastInitialState(keras.callbacks.Callback):
    """Sends weights, optimizer state and BN statistics of rank 0 to all ranks at the start (Lu et al. §2.2.3)."""

    def __init__(self, communicator: Broadcaster, variables: Callable[[], Sequence[keras.Variable]]):
        """Takes `variables`, which lists all to send, in the same order on every rank."""
        super().__init__()
        self._communicator = communicator
        self._variables = variables

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the variables."""
        self._communicator.broadcast_variables([v.value for v in self._variables()])
