"""Keras's `fit` over an exact order, with any backend of Keras."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import ExactBatchSampler
from hybrid_imagenet.order.sampling import Indices


class ExactDataset(keras.utils.PyDataset):
    """The passes of a sampler, one for each epoch of `fit` (see
    `hybrid_imagenet.order.keras_dataset`).

    Keras asks for the number of batches once per `fit`, but the first pass after a resume is
    shorter than others. It gets the length of the longest pass; a shorter pass ends like a dataset
    that has run out.

    Attributes:
      counter: the callback that counts the trained batches; `fit` needs it.
    """

    def __init__(self, sampler: ExactBatchSampler, load: Callable[[Indices], Any]) -> None:
        super().__init__()  # one worker: Keras starts several of them before the pass
        self.sampler = sampler
        self.counter = _Counter(self)
        self.counted = False
        self._load = load
        self._in_pass = False
        self._next = 0
        self._ready = False
        self._quiet = contextlib.ExitStack()

    @property
    def num_batches(self) -> int:
        """Batches of the current pass; outside of it, of the longest one."""
        return len(self.sampler) if self._in_pass else self.sampler.longest

    def __getitem__(self, index: int) -> Any:
        """Loads a batch of the current pass.

        Raises:
          UserError: if batches are asked for in another order than the sampler's.
        """
        if index not in (0, self._next):
            raise UserError(
                "batches are read out of order: give fit(shuffle=False), and leave `workers` at 1"
            )
        self._next = index + 1
        return self._load(self.sampler.batch(index))

    def on_epoch_begin(self) -> None:
        """Starts a pass at the sampler's state; some backends read a batch to build the model
        before it.
        """
        if self._ready and not self.counted:
            raise UserError(
                "nothing counts the batches: give fit(callbacks=[dataset.counter, ...])"
            )
        self.sampler.start_pass()
        self._in_pass, self._next = self.counted, 0
        self._quiet.close()
        if self.num_batches < self.sampler.longest:
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)

    def on_epoch_end(self) -> None:
        """Ends the pass; Keras calls this before the first one too."""
        self._in_pass, self._next, self._ready = False, 0, True
        self._quiet.close()

    def end_fit(self) -> None:
        """Ends the last pass, also one that `stop_training` has cut."""
        self.on_epoch_end()
        self.counted = self._ready = False


class _Counter(keras.callbacks.Callback):
    """Moves the sampler's state with each trained batch; batches that Keras has read ahead do not
    count.
    """

    def __init__(self, dataset: ExactDataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._trained = 0

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Tells schedules, which get the same parameters, where a batch of a shortened pass
        lies.
        """
        super().set_params(params)
        if params:
            params["position_after"] = self._dataset.sampler.position_after

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses another number of steps than the sampler's."""
        steps = (self.params or {}).get("steps")
        if steps != self._dataset.sampler.longest:
            raise UserError(
                f"fit makes {steps} steps per epoch where the order has"
                f" {self._dataset.sampler.longest}: give no steps_per_epoch; after an interrupted"
                " fit, make a new dataset"
            )
        self._dataset.counted = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the last pass; the parameters, which the history of `fit` keeps, are JSON again."""
        (self.params or {}).pop("position_after", None)
        self._dataset.end_fit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Refuses an epoch whose order would be that of another.

        Raises:
          UserError: if the sampler's epoch is not that of `fit`.
        """
        self._trained = 0
        if epoch != self._dataset.sampler.epoch:
            raise UserError(
                f"fit begins epoch {epoch} where the order is in epoch"
                f" {self._dataset.sampler.epoch}: load the run's state into the sampler"
                " (Checkpoint(folder, order=sampler) does), and give initial_epoch=sampler.epoch"
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts; with `steps_per_execution` several batches at once, of which the last may lie
        beyond the pass.
        """
        sampler = self._dataset.sampler
        done = min(batch + 1, self._dataset.num_batches)
        sampler.advance(done - self._trained)
        self._trained = done
