"""Runs Keras's `fit` over an exact order, with any backend of Keras."""

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
    """Gives `fit` the passes of a sampler, one per epoch.

    See `hybrid_imagenet.order.keras_dataset`. Keras asks for the number of batches once per `fit`,
    but the first pass after a resume is shorter than others. The dataset therefore returns the
    length of the longest pass, and a shorter pass ends like a dataset that has run out of data.

    Attributes:
      sampler: Gives the batches of example numbers.
      counter: The callback that counts the trained batches; `fit` needs it.
      has_counter: Whether the callback is among those of the running `fit`.
    """

    def __init__(self, sampler: ExactBatchSampler, load: Callable[[Indices], Any]) -> None:
        # Keras starts several workers before the pass begins, so only its default of one works.
        super().__init__()
        self.sampler = sampler
        self.counter = _Counter(self)
        self.has_counter = False
        self._load = load
        self._in_pass = False
        self._next_index = 0
        # Keras calls `on_epoch_end` once before the first pass.
        self._epoch_end_called = False
        self._suppressed_warnings = contextlib.ExitStack()

    @property
    def batch_size(self) -> int:
        """Examples in a batch of this rank."""
        return self.sampler.batch_size

    @property
    def num_batches(self) -> int:
        """Batches of the current pass; outside of a pass, those of the longest one."""
        return len(self.sampler) if self._in_pass else self.sampler.longest

    def __getitem__(self, index: int) -> Any:
        """Loads a batch of the current pass.

        Raises:
          UserError: If batches are requested in another order than the sampler's.
        """
        if index not in (0, self._next_index):
            raise UserError(
                "The batches were read out of order. Pass shuffle=False to fit, and leave `workers`"
                " at 1."
            )
        self._next_index = index + 1
        return self._load(self.sampler.batch(index))

    def on_epoch_begin(self) -> None:
        """Starts a pass at the sampler's state.

        Some backends read a batch before it, to build the model.
        """
        if self._epoch_end_called and not self.has_counter:
            raise UserError(
                "No callback counts the batches. Pass callbacks=[dataset.counter, ...] to fit."
            )
        self.sampler.start_pass()
        self._in_pass = self.has_counter
        self._next_index = 0
        self._suppressed_warnings.close()
        if self.num_batches < self.sampler.longest:
            # Keras expects the longest pass and would warn at the end of this one.
            self._suppressed_warnings.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)

    def on_epoch_end(self) -> None:
        """Ends the pass; Keras calls this before the first one too."""
        self._in_pass = False
        self._next_index = 0
        self._epoch_end_called = True
        self._suppressed_warnings.close()

    def end_fit(self) -> None:
        """Ends the last pass, also if `stop_training` has cut it short."""
        self.on_epoch_end()
        self.has_counter = False
        self._epoch_end_called = False


class _Counter(keras.callbacks.Callback):
    """Advances the sampler's state with each trained batch.

    Batches that Keras has read ahead are not counted.
    """

    def __init__(self, dataset: ExactDataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._trained = 0

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Adds `position_after` to the parameters, which all callbacks share.

        Schedules need it for the position of a batch in a shortened pass.
        """
        super().set_params(params)
        if params:
            params["position_after"] = self._dataset.sampler.position_after

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that `fit` makes as many steps as the sampler has batches.

        Raises:
          UserError: If it does not.
        """
        steps = (self.params or {}).get("steps")
        if steps != self._dataset.sampler.longest:
            raise UserError(
                f"fit makes {steps} steps per epoch, but the order has"
                f" {self._dataset.sampler.longest}. Omit steps_per_epoch. After an interrupted fit,"
                " create a new dataset."
            )
        self._dataset.has_counter = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the last pass."""
        # The history of `fit` keeps the parameters, which must be JSON-ready again.
        (self.params or {}).pop("position_after", None)
        self._dataset.end_fit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks that `fit` and the sampler are in the same epoch.

        Raises:
          UserError: If they are not, because the order would be that of another epoch.
        """
        self._trained = 0
        if epoch != self._dataset.sampler.epoch:
            raise UserError(
                f"fit begins epoch {epoch}, but the order is in epoch"
                f" {self._dataset.sampler.epoch}. Load the run's state into the sampler"
                " (Checkpoint(directory, order=sampler) does), and pass"
                " initial_epoch=sampler.epoch to fit."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the trained batches."""
        sampler = self._dataset.sampler
        # With `steps_per_execution` Keras reports several batches at once, of which the last may be
        # beyond the pass.
        trained = min(batch + 1, self._dataset.num_batches)
        sampler.advance(trained - self._trained)
        self._trained = trained
