"""Validates and saves averaged weights, with their statistics of batch normalization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.callbacks.batch_norm_statistics import Pairs
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.checkpoints.run_state import array_name
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.optimizers.average import WeightAverage


class SwapAveragedWeights(TrainingCallback):
    """Puts the averaged weights into the network for each validation.

    Pass it on every rank, after `default_callbacks()`. After the validation, the trained weights
    are back, and training continues as if nothing had happened: everything that the passes change
    is restored, including the state of dropout.

    `ModelCheckpoint` and `model.save` therefore save the trained weights, not those that were
    validated. To save the averages, exchange the two: `average.exchange()`, `model.save(file)`, and
    `average.exchange()` again.

    With `measure`, the statistics of batch normalization are measured again with the averaged
    weights, on training batches (`PreciseStatistics`). An average of the statistics of past steps
    would not fit the averaged weights: their activations vary less, because averaging removes the
    noise of single steps. Measuring costs one forward pass per batch at each validation and
    checkpoint, and nothing per step. Without `measure`, as in the example, the statistics stay
    those of the trained weights.

    Example:
      average = hi.optimizers.WeightAverage(0.999)
      optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1), average=average)
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.SwapAveragedWeights(average)]

    Args:
      average: The average that the optimizer updates.
      statistics: (mean, variance) of every normalization layer (default: (), none is measured).
      measure: Function that measures `statistics` for the current weights, merged over ranks
        (default: None).

    Reference:
      Izmailov et al., arXiv 1803.05407, 3.2.
    """

    def __init__(
        self,
        average: WeightAverage,
        statistics: Pairs = (),
        measure: Callable[[], None] | None = None,
    ):
        super().__init__()
        self._average = average
        self._statistics = {v.path: v for pair in statistics for v in pair}
        self._averaged_statistics = {
            path: keras.Variable(v.numpy(), trainable=False, name=v.name)
            for path, v in self._statistics.items()
        }
        self._measure = measure
        # Values of the variables that are not trained, such as statistics and the state of dropout,
        # while the averages are in the network; otherwise None.
        self._saved_values: list[tf.Tensor] | None = None
        self._is_current = False

    def variables(self) -> Mapping[str, keras.Variable]:
        """Returns the averages and their statistics.

        Each name ends with the path of the variable of the model that it can replace.
        """
        averages = [*self._average.items(), *self._averaged_statistics.items()]
        return {
            array_name("average", number, path): variable
            for number, (path, variable) in enumerate(averages)
        }

    def set_model(self, model: keras.Model) -> None:
        """Restores the trained weights after a validation that was interrupted."""
        super().set_model(model)
        self._swap_out()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the optimizer updates the average.

        Raises:
          UserError: On all ranks, if no optimizer of the model does.
        """
        optimizers = compiled_model.distributed(self.model).values()
        if not any(optimizer.average is self._average for optimizer in optimizers):
            raise SharedError(
                "No optimizer of the model updates the average of SwapAveragedWeights. Pass the"
                " same object to both: DistributedOptimizer(..., average=average)."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_current = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages and their statistics in place; every rank calls it."""
        self.before_save()
        self._swap_in()
        for path, variable in self._statistics.items():
            variable.assign(self._averaged_statistics[path].value)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the trained weights, even after a validation that has failed."""
        self._swap_out()

    def before_save(self) -> None:
        """Measures the statistics under the averages, unless no step was made since."""
        if self._is_current or self._measure is None:
            return
        self._is_current = True
        self._swap_in()
        try:
            self._measure()
            for path, variable in self._statistics.items():
                self._averaged_statistics[path].assign(variable.value)
        finally:
            self._swap_out()

    def _swap_in(self) -> None:
        self._saved_values = [tf.identity(v.value) for v in self.model.non_trainable_variables]
        # The average keeps the trained weights meanwhile.
        self._average.exchange()

    def _swap_out(self) -> None:
        if self._saved_values is None:
            return
        self._average.exchange()
        variables = self.model.non_trainable_variables
        for variable, value in zip(variables, self._saved_values, strict=True):
            variable.assign(value)
        self._saved_values = None
