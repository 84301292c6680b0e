"""Hands the values of a schedule to the optimizers of `model.fit` before each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.library.broadcast import set_scalars
from hybrid_imagenet.library.trust_coefficient import set_trust_coefficient
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer

_log = logging.getLogger(__name__)

Schedule = Callable[[float, float, int], Mapping[str, float]]


class HyperparameterSchedule(keras.callbacks.Callback):
    """Sets learning rate, momentum, phase and the AdaBound bounds before every step, as `schedule=`
    of optimizers says.

    The fractional epochs of a step follow from the number of steps per epoch, or from the exact
    order (`hybrid_imagenet.order.keras_dataset`), whose first pass after a resume is shorter. With
    `steps_per_execution=k` the values change every k steps. An optimizer of Keras takes the
    learning rate only.

    Before the first step it also sets the trust coefficient of LARS and Hybrid, with or without a
    schedule, unless one was passed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch = 0
        self._used: dict[str, tuple[Any, Schedule]] = {}
        self._rates: dict[str, float] = {}  # that this callback has left, or has found at the start
        self._values: dict[str, dict[str, float]] = {}
        self._is_first_epoch = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds optimizers and schedules.

        Raises:
          UserError: if the number of steps per epoch is not known.
        """
        self._used, self._rates, self._values = {}, {}, {}
        self._is_first_epoch = True
        for name, optimizer in compiled_model.optimizers(self.model).items():
            schedule = getattr(optimizer, "schedule", None)
            if schedule is not None:
                self._used[name] = optimizer, schedule
                optimizer.schedule_is_applied = True
        if self._used and not (self.params or {}).get("steps"):
            raise UserError(
                "a schedule needs to know how long an epoch is: give fit steps_per_epoch"
            )
        for name, (_, schedule) in self._used.items():
            epochs = (self.params or {}).get("epochs", 0)
            if (
                schedule(epochs - 0.5, epochs, getattr(schedule, "base_batch", 0)).get(
                    "learning_rate"
                )
                == 0
            ):
                _log.warning(
                    "%s: the schedule's learning rate is 0 before epoch %d, the last one, ends",
                    name,
                    epochs,
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets missing trust coefficients in the first epoch; every rank calls it.

        Later callbacks, such as `Checkpoint`, restore a coefficient when training begins, so this
        cannot be earlier. It cannot be later, because the first step is compiled with it.

        Raises:
          SharedError: as `set_trust_coefficient`.
        """
        self._epoch = epoch
        if self._is_first_epoch:
            self._is_first_epoch = False
            epochs = (self.params or {}).get("epochs", 0)
            for optimizer in compiled_model.optimizers(self.model).values():
                set_trust_coefficient(optimizer, epochs, process.communicator())
        if not self._rates:
            self._rates = {
                name: float(optimizer.learning_rate) for name, (optimizer, _) in self._used.items()
            }

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the values for the steps that `fit` is about to make.

        Raises:
          UserError: if another callback has set the learning rate since.
        """
        steps = (self.params or {}).get("steps")
        after = (self.params or {}).get("position_after", lambda done: self._epoch + done / steps)
        for name, (optimizer, schedule) in self._used.items():
            images: int = getattr(schedule, "base_batch", 0)
            start, end = after(batch), after(min(batch + self.model.steps_per_execution, steps))
            values = dict(schedule(start, end, images))
            if (
                batch == 0 and "learning_rate" in values
            ):  # once in an epoch: a look at Keras's optimizers may wait
                _refuse_another(name, float(optimizer.learning_rate), self._rates[name])
            set_scalars(optimizer, values)
            self._values[name] = values
            self._rates[name] = values.get("learning_rate", self._rates[name])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values of the last step to the logs, those that the optimizer uses."""
        if logs is None:
            return
        for name, values in self._values.items():
            prefix = "" if len(self._values) == 1 else f"{name}."
            logs.update({prefix + key: values[key] for key in _shown(self._used[name][0], values)})


def _shown(optimizer: Any, values: Mapping[str, float]) -> list[str]:
    inner = getattr(optimizer, "inner", optimizer)
    if not isinstance(inner, GroupedOptimizer):
        used = ["learning_rate"]
    elif inner.num_phases > 1:
        return list(values)
    else:
        used = ["learning_rate", "momentum"]
    return [name for name in used if name in values]


def _refuse_another(name: str, rate: float, known: float) -> None:
    """Raises UserError for a learning rate that the schedule has not set."""
    if np.float32(rate) != np.float32(known):
        raise UserError(
            f"the learning rate of {name} is {rate:g} where the schedule has left {known:g}:"
            " another callback sets it too, as LearningRateScheduler and ReduceLROnPlateau do; use"
            " either that callback or schedule=..."
        )
