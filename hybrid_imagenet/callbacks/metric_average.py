"""Averages the metrics of `model.fit` over all ranks from exact sums and counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.comm import process
from hybrid_imagenet.library import metric_sums
from hybrid_imagenet.order.same_order import check_same_order

_log = logging.getLogger(__name__)
Value = float | np.ndarray

SAME_DATA = (
    "All ranks had the same loss, so they seem to have the same data. Give each rank its own part"
    " by hybrid_imagenet.data.shard, and a separate file to tf.data's cache(), such as"
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
      results: values by name of the last validation, also of one outside of `fit`, because Keras's
        `evaluate` returns the rank's own values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, Value] = {}
        self._in_epoch = self._compared = False
        self._trained: dict[str, Value] | None = None
        self._validated: dict[str, Value] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True
        self._trained = self._validated = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the results of training, before `fit` resets the metrics for validation.

        Raises:
          UserError: on all ranks, outside `fit`, if data were shared out in different orders.
        """
        if self._in_epoch:
            self._trained = self._merged()
        else:
            check_same_order(process.communicator())

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the results of validation, and shows them to the callbacks behind this one."""
        self.results = self._merged()
        if self._in_epoch:
            self._validated = self.results
        if logs is not None:
            logs.update((name, value) for name, value in self.results.items() if name in logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages of all ranks into the logs; every rank calls it.

        Warns once if all losses are equal.
        """
        if logs is None:
            return
        if not self._compared:
            own, self._compared = logs.get("loss"), True
            one = float(own) if own is not None and np.ndim(own) == 0 else 0.0
            losses = process.communicator().allgather_object(one)
            if losses[0] and losses.count(losses[0]) == len(losses) > 1 and process.rank() == 0:
                _log.warning(SAME_DATA)
        found = dict(self._trained if self._trained is not None else self._merged())
        found |= {f"val_{name}": value for name, value in (self._validated or {}).items()}
        rest = {name: value for name, value in logs.items() if name not in found}
        logs.update({name: value for name, value in found.items() if name in logs})
        logs.update(_alike(rest))
        self._in_epoch = False

    def _merged(self) -> dict[str, Value]:
        """Returns the results of the summed states; this rank's states stay as they are."""
        communicator = process.communicator()
        metrics = []
        if communicator.size > 1:
            metrics = [
                metric
                for metric in metric_sums.single_metrics(self.model.metrics)
                if metric_sums.has_summable_state(metric)
            ]
        with metric_sums.summed_over_ranks(metrics, communicator):
            return _alike(metric_sums.metric_results(self.model))


def _alike(own: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the means over ranks of the numbers and arrays that all of them have.

    Equal values stay exactly as they are. Arrays whose shapes differ between ranks are omitted.
    """
    arrays = {name: np.asarray(value) for name, value in own.items()}
    lists = {name: array.tolist() for name, array in arrays.items() if array.dtype.kind in "bfiu"}
    rows = process.communicator().allgather_object(lists)
    found: dict[str, Value] = {}
    for name, first in rows[0].items():
        values = [
            row[name] for row in rows if name in row and np.shape(row[name]) == np.shape(first)
        ]
        if len(values) < len(rows):
            continue
        mean = values[0] if all(value == values[0] for value in values) else np.mean(values, axis=0)
        found[name] = np.asarray(mean, arrays[name].dtype) if np.ndim(mean) else float(mean)
    return found
