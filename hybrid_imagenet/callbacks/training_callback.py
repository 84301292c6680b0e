"""The base class of callbacks that save state or communicate, and the sequence of the program's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.training_run import FitRun, Run


class TrainingCallback(keras.callbacks.Callback):
    """A Keras callback that can save variables and communicate with the other ranks.

    A callback can have two kinds of state. `variables` returns those on the device. `state_dict()`
    returns values that JSON can represent, and `load_state_dict(state)` sets them in a resumed run,
    after `on_train_begin` of the callback and before its first `on_epoch_begin`. Any callback of
    Keras may have these two methods. Checkpoints contain the state of rank 0, which all ranks
    continue with.

    Example:
      class LargestLoss(hi.callbacks.TrainingCallback):
          def __init__(self):
              super().__init__()
              self.epochs = 0
              self.loss = keras.Variable(0.0, trainable=False, name="largest_loss")

          def on_epoch_end(self, epoch, logs=None):
              self.epochs += 1
              self.loss.assign(keras.ops.maximum(self.loss, logs["loss"]))

          def variables(self):
              return {"largest_loss": self.loss}

          def state_dict(self):
              return {"epochs": self.epochs}

          def load_state_dict(self, state):
              self.epochs = state["epochs"]

    The training loop of the program and `model.fit` call callbacks at the same events, with these
    differences:

    - `batch` counts the updates since the latest `on_epoch_begin` in the program, and the
      micro-batches of the epoch in `fit`. With `steps_per_execution=k`, which only `fit` has, there
      is one event for k batches: `on_train_batch_begin` gets the number of the first one, and
      `on_train_batch_end` the number of the last one, which may be beyond the end of the epoch.
    - The logs of `on_train_batch_end` are None in the program, unless values were fetched from the
      device for this step (--log_every_steps). On a GPU the loss, the accuracy and the values of
      the optimizer are then usually two steps old, see `DelayedReadback`. The number of the step,
      the position and the values of the schedule belong to this step.
    - A validation inside an epoch ends and begins the epoch for callbacks of the program:
      `on_epoch_end` is called with the number of the epoch, and `logs["epoch"]` is the number of
      fractional epochs that are done.

    Attributes:
      run: Position, model, optimizers and ranks of the run that calls this callback. A callback has
        it from `set_params` on, so before `on_train_begin`.
    """

    run: Run

    def set_params(self, params: dict[str, Any] | None) -> None:
        super().set_params(params)
        if params is not None:
            self.run = FitRun.of(self._model, params)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the run."""
        return self.run.communicator

    def before_save(self) -> None:
        """Prepares variables for a checkpoint; every rank calls it, in the order of callbacks."""

    def variables(self) -> Mapping[str, keras.Variable]:
        """Returns variables that checkpoints contain, by name.

        They exist before `on_train_begin`, on every rank. A name, such as "ema/dense/kernel", is
        the same in every run, and no other callback uses it. A checkpoint can only be resumed with
        the same variables, so adding or removing one makes earlier checkpoints useless.
        """
        return {}


class CallbackSequence:
    """Calls callbacks in order, for the program's training loop.

    `keras.callbacks.CallbackList` is not used, because it converts all values of the logs to
    float, sorts them, and passes the callbacks a copy.

    Attributes:
      callbacks: Callbacks in the order in which they are called.
    """

    def __init__(
        self,
        callbacks: Iterable[keras.callbacks.Callback],
        run: Run,
        epochs: float,
    ):
        """Gives the callbacks their run, model and parameters.

        Args:
          callbacks: Callbacks in the order in which they are called.
          run: Run of the program.
          epochs: Length of the run.
        """
        self.callbacks = list(callbacks)
        params = {"epochs": epochs, "steps": None, "verbose": 0, "run": run}
        for callback in self.callbacks:
            callback.set_params(params)
            callback.set_model(run.model)

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


def prepare_to_save(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Calls `before_save` of each `TrainingCallback`, in their order; every rank calls it."""
    for callback in callbacks:
        if isinstance(callback, TrainingCallback):
            callback.before_save()
