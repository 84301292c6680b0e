"""Averages metrics over all ranks from exact sums and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm import process
from hybrid_imagenet.training.accumulators import from_vector


class MetricAverage(keras.callbacks.Callback):
    """Replaces an epoch's local values by averages over the examples of all ranks.

    Sums and counts are added over ranks in float64 and divided once, so that the result does not depend on how the
    examples were shared out. The program's loop hands its sums over in the logs. In `model.fit` they are the states of
    Keras's metrics (sums and counts, confusion counts, ...), and the result of the added states takes the place of each
    rank's own, for training and validation; values that come from elsewhere, a metric class of one's own or a
    `train_step`'s logs, are averaged as they are, each rank counting alike.
    """

    def __init__(self, allreduce_sum: Callable[[tf.Tensor, str], tf.Tensor] | None = None):
        """Takes the sum over ranks; by default over those of this process."""
        super().__init__()
        self._allreduce_sum = allreduce_sum
        self._in_epoch = False
        self._trained: dict[str, float] | None = None
        self._validated: dict[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = True
        self._trained = self._validated = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the results of training, before `fit` resets the metrics for validation."""
        if self._in_fit():
            self._trained = self._merged()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Takes the results of validation; puts them into the logs of a validation outside of `fit`."""
        if self.model is None:
            return
        merged = self._merged()
        if self._in_epoch:
            self._validated = merged
        if logs is not None:
            logs.update((name, value) for name, value in merged.items() if name in logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages of all ranks into the logs; `train_loss`, `train_top1`, `train_top5` for "sums"."""
        if logs is None:
            return
        if "sums" in logs and self._allreduce_sum is not None:
            local = logs.pop("sums")
            vector = tf.constant([local.loss, local.top1, local.top5, local.count], tf.float64)
            logs.update(from_vector(self._allreduce_sum(vector, "train_sums")).means("train"))
        elif self._in_fit():
            self._replace(logs)
        self._in_epoch = False

    def _in_fit(self) -> bool:
        return self._in_epoch and self.model is not None

    def _replace(self, logs: dict[str, Any]) -> None:
        found = dict(self._trained if self._trained is not None else self._merged())
        found |= {f"val_{name}": value for name, value in (self._validated or {}).items()}
        rest = {name: float(v) for name, v in logs.items() if name not in found and isinstance(v, (int, float))}
        logs.update({name: value for name, value in found.items() if name in logs})
        logs.update(_alike(process.current().allgather_object(rest)))

    def _merged(self) -> dict[str, float]:
        """Returns the results of all ranks' states together; this rank's states stay as they are."""
        ranks = process.current()
        added = _metrics(self.model.metrics) if ranks.size > 1 else ()
        held = [v for metric in added if _adds_up(metric) for v in metric.variables]
        own = [v.numpy() for v in held]
        if own:
            vector = np.concatenate([np.ravel(value).astype(np.float64) for value in own])
            total = ranks.allreduce_sum(tf.constant(vector), "metrics").numpy()
            ends = np.cumsum([value.size for value in own])
            for variable, value, end in zip(held, own, ends, strict=True):
                variable.assign(total[end - value.size : end].reshape(value.shape).astype(value.dtype))
        results = {name: float(value) for name, value in self.model.get_metrics_result().items() if np.ndim(value) == 0}
        for variable, value in zip(held, own, strict=True):
            variable.assign(value)
        return _alike(ranks.allgather_object(results))


def _metrics(found: Any) -> Iterator[keras.metrics.Metric]:
    """Yields the metrics inside of those that only hold others."""
    for metric in found:
        inside = getattr(metric, "metrics", None)
        if inside:
            yield from _metrics(inside)
        else:
            yield metric


def _adds_up(metric: keras.metrics.Metric) -> bool:
    """Returns whether states of a metric can be added: those of Keras's own can; of others one cannot know."""
    return type(metric).__module__.partition(".")[0] == "keras"


def _alike(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean over ranks of what all of them have; of equal values the value itself."""
    common = [name for name in rows[0] if all(name in row for row in rows)]
    values = {name: [row[name] for row in rows] for name in common}
    return {name: row[0] if len(set(row)) == 1 else sum(row) / len(row) for name, row in values.items()}
