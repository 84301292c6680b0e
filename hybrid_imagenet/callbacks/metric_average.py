"""Averages the metrics of `model.fit` over all ranks from exact sums and counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.callbacks import metric_sums
from hybrid_imagenet.comm import process
from hybrid_imagenet.order.same_order import check_same_order

_log = logging.getLogger(__name__)
Value = float | np.ndarray
# NumPy's letters for the kinds of types that have a mean: bool, float, int and unsigned int.
_NUMERIC_KINDS = "bfiu"

SAME_DATA = (
    "All ranks had the same loss, so they seem to have the same data. Give each rank its own part"
    " with hybrid_imagenet.data.shard, and a separate file to tf.data's cache(), such as"
    " cache(f'cache_{hi.rank()}')"
)


class MetricAverage(keras.callbacks.Callback):
    """Replaces the values in the logs of epochs by averages over the examples of all ranks.

    It is one of `default_callbacks()`. States of Keras's metrics (sums and counts, confusion
    counts, ...), of classes derived from them and of classes with `sums_over_ranks = True` are
    summed over ranks in float64. The result of the sums replaces each rank's own, for training and
    validation. Values that come from elsewhere, such as other classes of metrics or the logs of a
    `train_step`, are averaged as they are, and each rank has the same weight. Vectors are treated
    like numbers.

    Attributes:
      results: Values of the last validation by name, including one outside `fit`, because
        `evaluate` of Keras returns the values of one rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, Value] = {}
        self._in_epoch = False
        self._has_compared_losses = False
        # Classes of metrics of which only the mean over ranks is known.
        self._reported_kinds: set[type[keras.metrics.Metric]] = set()
        # Averages of the current epoch, if they have been computed already.
        self._training_results: dict[str, Value] | None = None
        self._validation_results: dict[str, Value] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True
        self._training_results = None
        self._validation_results = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Averages the results of training, before `fit` resets the metrics for validation.

        Raises:
          UserError: On all ranks, outside `fit`, if they divided their data in different orders.
        """
        if self._in_epoch:
            self._training_results = self._average_results()
        else:
            check_same_order(process.communicator())

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Averages the results of validation, and puts them into the logs for later callbacks."""
        self.results = self._average_results()
        if self._in_epoch:
            self._validation_results = self.results
        if logs is not None:
            _replace_values(logs, self.results)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages of all ranks into the logs; every rank calls it.

        Warns once if all losses are equal.
        """
        if logs is None:
            return
        if not self._has_compared_losses:
            self._has_compared_losses = True
            _warn_of_equal_losses(logs.get("loss"))
        if self._training_results is None:
            self._training_results = self._average_results()
        averages = dict(self._training_results)
        for name, value in (self._validation_results or {}).items():
            averages[f"val_{name}"] = value
        other_values = {name: value for name, value in logs.items() if name not in averages}
        _replace_values(logs, averages)
        logs.update(_means_over_ranks(other_values))
        self._in_epoch = False

    def _average_results(self) -> dict[str, Value]:
        """Returns the results of the summed states; this rank's states stay as they are."""
        communicator = process.communicator()
        metrics = []
        if communicator.size > 1:
            for metric in metric_sums.single_metrics(self.model.metrics):
                if metric_sums.has_summable_state(metric):
                    metrics.append(metric)
                else:
                    self._warn_of_mean(metric)
        with metric_sums.summed_over_ranks(metrics, communicator):
            return _means_over_ranks(metric_sums.metric_results(self.model))

    def _warn_of_mean(self, metric: keras.metrics.Metric) -> None:
        """Warns once on rank 0 of a metric of which the mean over ranks is logged."""
        kind = type(metric)
        undecided = getattr(metric, "sums_over_ranks", None) is None
        if undecided and kind not in self._reported_kinds and process.rank() == 0:
            self._reported_kinds.add(kind)
            _log.warning(
                "The metric %s is averaged over ranks with equal weight, because the states of the"
                " class %s may not be sums. Set sums_over_ranks = True in the class if they are, or"
                " False if not.",
                metric.name,
                kind.__name__,
            )


def _replace_values(logs: dict[str, Any], values: Mapping[str, Value]) -> None:
    """Replaces the values of the logs that have a new value, and adds none."""
    logs.update((name, value) for name, value in values.items() if name in logs)


def _warn_of_equal_losses(loss: Any) -> None:
    """Warns on rank 0 if all ranks have the same loss; every rank calls it."""
    own_loss = float(loss) if loss is not None and np.ndim(loss) == 0 else None
    losses = process.communicator().allgather_object(own_loss)
    if show_same_data(losses) and process.rank() == 0:
        _log.warning(SAME_DATA)


def show_same_data(losses: Sequence[float | None]) -> bool:
    """Returns whether the losses of all ranks show that they have the same data.

    A loss of 0, NaN or infinity shows nothing, because other data may have it, too.
    """
    first = losses[0]
    if len(losses) == 1 or not first or not math.isfinite(first):
        return False
    return all(loss == first for loss in losses)


def _means_over_ranks(values: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the means over ranks of the numbers and arrays that all ranks have.

    Equal values stay exactly as they are. Arrays whose shapes differ between ranks are omitted.
    """
    arrays = {name: np.asarray(value) for name, value in values.items()}
    numbers = {
        name: array.tolist() for name, array in arrays.items() if array.dtype.kind in _NUMERIC_KINDS
    }
    numbers_of_ranks = process.communicator().allgather_object(numbers)
    means: dict[str, Value] = {}
    for name, first in numbers_of_ranks[0].items():
        rank_values = [rank_numbers.get(name) for rank_numbers in numbers_of_ranks]
        if any(value is None or np.shape(value) != np.shape(first) for value in rank_values):
            continue
        are_equal = all(value == first for value in rank_values)
        mean = first if are_equal else np.mean(rank_values, axis=0)
        means[name] = np.asarray(mean, arrays[name].dtype) if np.ndim(mean) else float(mean)
    return means
