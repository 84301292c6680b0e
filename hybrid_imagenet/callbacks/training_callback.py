"""The base class of this package's callbacks, and the list in which the program calls them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keras

from hybrid_imagenet.comm import Communicator, process


class StepSpan(NamedTuple):
    """A step as a schedule sees it.

    Attributes:
      start: fractional epochs done before the step.
      end: fractional epochs done after the step.
      global_batch: images of all ranks in the step.
    """

    start: float
    end: float
    global_batch: int


class TrainingCallback(keras.callbacks.Callback):
    """A Keras callback that can have state in checkpoints and work with every rank.

    The training loop of the program and `model.fit` call callbacks at the same events, with these
    differences:

    * `batch` counts the updates since the latest `on_epoch_begin` in the program, and the
      micro-batches of the epoch in `fit`. With `steps_per_execution=k` Keras calls the events once
      for k batches.
    * The logs of `on_train_batch_end` are None in the program, unless values were fetched from the
      device for this step (--log_every_steps). On a GPU they are then those of two steps before.
    * A validation inside an epoch ends and begins the epoch for callbacks of the program:
      `on_epoch_end` is called with the number of the epoch, and `logs["epoch"]` is the number of
      fractional epochs that are done.
    * `params["step_span"]()` returns the `StepSpan` of the next step, in the program only.
    """

    def __init__(self, communicator: Communicator | None = None):
        """Sets the communicator; None uses the ranks of this process."""
        super().__init__()
        self._given_communicator = communicator

    @property
    def in_program(self) -> bool:
        """Whether the program's loop calls this callback, and not `fit`."""
        return "step_span" in (self.params or {})

    @property
    def communicator(self) -> Communicator:
        """The communicator; its first use connects the ranks."""
        return self._given_communicator or process.communicator()

    def before_save(self) -> None:
        """Prepares variables for a checkpoint; every rank calls it, in the order of callbacks."""

    def variables(self) -> Mapping[str, keras.Variable]:
        """Returns variables that checkpoints contain, by a unique and stable name."""
        return {}


class StepCounter:
    """Counts steps over all epochs, although the batches of each epoch are numbered from 0.

    Attributes:
      steps: number of steps done.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._steps_before_epoch = 0

    def start(self, steps: int) -> None:
        """Begins after a number of steps."""
        self.steps = steps
        self._steps_before_epoch = steps

    def begin_epoch(self) -> None:
        """Begins to number batches from 0 again."""
        self._steps_before_epoch = self.steps

    def end_batch(self, batch: int) -> None:
        """Counts the batch with this number."""
        self.steps = self._steps_before_epoch + batch + 1


class CallbackSequence:
    """Calls callbacks in order, for the program's training loop.

    `keras.callbacks.CallbackList` is not used, because it converts all values of the logs to
    float, sorts them, and passes the callbacks a copy.

    Attributes:
      callbacks: in the order in which they are called.
    """

    def __init__(
        self,
        callbacks: Iterable[keras.callbacks.Callback],
        model: keras.Model,
        params: dict[str, Any],
    ):
        """Gives the callbacks their model and parameters.

        Args:
          callbacks: in the order in which they are called.
          model: the network, whose `optimizer` is the one that trains it.
          params: all callbacks share this dictionary, so later changes reach them.
        """
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            callback.set_params(params)
            callback.set_model(model)

    def on_train_begin(self) -> None:
        for callback in self.callbacks:
            callback.on_train_begin()

    def on_epoch_begin(self, epoch: int) -> None:
        for callback in self.callbacks:
            callback.on_epoch_begin(epoch)

    def on_train_batch_begin(self, batch: int) -> None:
        for callback in self.callbacks:
            callback.on_train_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None) -> None:
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs)

    def on_test_begin(self) -> None:
        for callback in self.callbacks:
            callback.on_test_begin()

    def on_test_batch_end(self, batch: int) -> None:
        for callback in self.callbacks:
            callback.on_test_batch_end(batch)

    def on_test_end(self, logs: dict[str, Any] | None) -> None:
        for callback in self.callbacks:
            callback.on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_train_end(self) -> None:
        for callback in self.callbacks:
            callback.on_train_end()


def print_to_stderr(line: str) -> None:
    """Prints a line for the user of `fit`."""
    print(line, file=sys.stderr, flush=True)


def before_save(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Calls `TrainingCallback.before_save` of those that have it; every rank calls it."""
    for callback in callbacks:
        if isinstance(callback, TrainingCallback):
            callback.before_save()


def saved_variables(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, keras.Variable]:
    """Returns the variables of all callbacks that checkpoints contain, by name."""
    variables: dict[str, keras.Variable] = {}
    for callback in callbacks:
        if isinstance(callback, TrainingCallback):
            variables |= callback.variables()
    return variables
