"""Position, ranks and values of a run, for its callbacks. The program and `fit` each create one."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt

from hybrid_imagenet import private_api
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers import compiled_model


class StepSpan(NamedTuple):
    """A step as a schedule sees it.

    Attributes:
      start: Fractional epochs done before the step.
      end: Fractional epochs done after the step.
      global_batch: Images of all ranks in the step; 0 in `fit`, where each schedule has its batch.
    """

    start: float
    end: float
    global_batch: int


class Run(abc.ABC):
    """Position, ranks and values of the run that calls a callback, as `self.run`.

    It has no configuration. A callback that needs settings gets them in its constructor.

    Attributes:
      model: The network.
      state: Position of the run. The loop advances it before `on_train_batch_end`, and callbacks
        read it.
      span: The present step, from `on_train_batch_begin` to `on_train_batch_end`. With
        `steps_per_execution=k` of `fit`, the next k steps.
      save_requested: Whether all ranks have agreed to save after the last step.
    """

    def __init__(self, model: Any, state: RunState):
        """Begins before the first step.

        Args:
          model: The network.
          state: Position of the run.
        """
        self.model = model
        self.state = state
        self.span = StepSpan(0.0, 0.0, 0)
        self.save_requested = False

    @property
    @abc.abstractmethod
    def communicator(self) -> Communicator:
        """The communicator; in `fit`, its first use connects the ranks."""

    @property
    @abc.abstractmethod
    def position(self) -> float:
        """Fractional epochs that are done."""

    @abc.abstractmethod
    def is_at_end(self) -> bool:
        """Returns whether no step is left to train."""

    @abc.abstractmethod
    def read(self, name: str) -> npt.NDArray[np.float64]:
        """Returns a value of the last step, float64 [n], such as "grad_norm" or "loss_scale".

        In the program, inside an event whose logs are not None, values are usually two steps old on
        a GPU, so that the host does not wait. At other times, and in `fit`, it waits for the
        device.

        Args:
          name: One of `DistributedOptimizer.telemetry_variables`.
        """

    @abc.abstractmethod
    def request_stop(self, reason: str) -> None:
        """Ends training after this event; call it on all ranks at the same event.

        Args:
          reason: One word, such as "target", which the program records.
        """

    @abc.abstractmethod
    def check_positions(self) -> None:
        """Checks that the fractional epochs of a step are known.

        Raises:
          UserError: In `fit`, if the number of steps per epoch is not known.
        """

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """The optimizers of the model by name, see `compiled_model.optimizers`.

        The search visits all layers, so do not repeat it in each step.
        """
        return compiled_model.optimizers(self.model)


class FitRun(Run):
    """A run of `fit`. It counts batches, because `fit` does not pass its position to callbacks.

    With gradient accumulation an update takes several batches.

    Attributes:
      batches: Batches of the epoch that are done, including the batches of an earlier `fit`.
    """

    def __init__(self, model: Any, params: Mapping[str, Any]):
        """Begins before the first step.

        Args:
          model: The network.
          params: Parameters of Keras's callbacks: "epochs" and "steps", which is None if it is not
            known.
        """
        super().__init__(model, RunState())
        self.batches = 0
        self._params = params
        self._epoch = 0
        # Batches of the epoch that an earlier `fit` has trained.
        self._first_batch = 0

    @classmethod
    def of(cls, model: Any, params: dict[str, Any]) -> Run:
        """Returns the run of a list of callbacks; the first callback that asks creates it.

        Args:
          model: The network.
          params: The dictionary that all callbacks of the list share.
        """
        run: Run | None = params.get("run")
        if run is None:
            run = cls(model, params)
            params["run"] = run
            # Before all others, so that it counts a batch before they look.
            private_api.insert_callback(_Position(run, params), 0)
        return run

    @property
    def communicator(self) -> Communicator:
        """The communicator of this process."""
        return process.communicator()

    @property
    def position(self) -> float:
        """Fractional epochs that are done; whole ones if the length of an epoch is not known."""
        return self._position_after(self.batches)

    def is_at_end(self) -> bool:
        """Returns whether all epochs are done or a callback has stopped `fit`."""
        epochs_done = max(self.position, self.state.recorded_at)
        return bool(self.model.stop_training or epochs_done >= self._params.get("epochs", 0))

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """Returns a value of the first distributed optimizer; waits for the device."""
        optimizers = list(compiled_model.distributed(self.model).values())
        if not optimizers:
            # Keras would take a StopIteration for the end of the data.
            raise UserError(
                f"The value {name} of a step needs an optimizer of this package. Compile with"
                " hybrid_imagenet.DistributedOptimizer(...)."
            )
        values = optimizers[0].telemetry_variables()[name].numpy()
        return np.atleast_1d(values).astype(np.float64)

    def request_stop(self, reason: str) -> None:
        """Ends `fit` after the current batch or epoch."""
        self.state.stop = reason
        self.model.stop_training = True

    def check_positions(self) -> None:
        """Raises UserError if the number of steps per epoch is not known."""
        if not self._params.get("steps"):
            raise UserError(
                "A schedule needs the length of an epoch, which is not known for these data. Pass"
                " steps_per_epoch to fit."
            )

    def begin_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Begins to number batches from 0 again.

        Args:
          epoch: Number of the epoch, from 0.
          first_batch: Batches of the epoch that an earlier `fit` has trained.
        """
        self._epoch = epoch
        self._first_batch = first_batch
        self.batches = first_batch

    def begin_batch(self, batch: int) -> None:
        """Sets the span of the next steps, if it is known."""
        steps = self._params.get("steps")
        if steps:
            start = self._first_batch + batch
            end = min(start + self.model.steps_per_execution, steps)
            self.span = StepSpan(self._position_after(start), self._position_after(end), 0)

    def end_batch(self, batch: int) -> None:
        """Counts the batches up to this one."""
        batches = self._first_batch + batch + 1
        # With `steps_per_execution` the last event of an epoch may be for batches beyond its end.
        batches = min(batches, self._params.get("steps") or batches)
        self.state.step += batches - self.batches
        self.batches = batches

    def _position_after(self, batches: int) -> float:
        """Returns the fractional epochs done after some batches of the epoch."""
        # The exact order of `hi.order` counts the batches of this `fit`.
        position_after = self._params.get("position_after")
        if position_after is not None:
            return float(position_after(batches - self._first_batch))
        steps = self._params.get("steps")
        return self._epoch + batches / steps if steps else float(self._epoch)


class _Position(keras.callbacks.Callback):
    """Advances the position of a run of `fit`."""

    def __init__(self, run: FitRun, params: dict[str, Any]):
        super().__init__()
        self._run = run
        self._params = params

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.begin_batch(batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._run.end_batch(batch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # The history of `fit` keeps the parameters, which must be JSON-ready again.
        self._params.pop("run", None)
