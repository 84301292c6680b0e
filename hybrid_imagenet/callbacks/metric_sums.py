"""Sums the states of metrics over ranks, for `fit` and `hi.evaluate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm import Communicator


def single_metrics(metrics: Any) -> Iterator[keras.metrics.Metric]:
    """Yields the metrics, with containers such as CompileMetrics replaced by their members."""
    for metric in metrics:
        inside = getattr(metric, "metrics", None)
        if inside:
            yield from single_metrics(inside)
        else:
            yield metric


def has_summable_state(metric: keras.metrics.Metric) -> bool:
    """Returns whether the states of a metric may be summed over ranks.

    They may for the metrics of Keras, whose states are sums and counts, and for classes derived
    from one of them, such as `keras.metrics.Mean`. The states of a class derived from
    `keras.metrics.Metric` itself may be anything, such as a maximum, so its author has to set the
    attribute `sums_over_ranks = True`.
    """
    declared = getattr(metric, "sums_over_ranks", None)
    if declared is not None:
        return bool(declared)
    return any(
        issubclass(base, keras.metrics.Metric)
        and base is not keras.metrics.Metric
        and base.__module__.partition(".")[0] == "keras"
        for base in type(metric).__mro__
    )


@contextlib.contextmanager
def summed_over_ranks(
    metrics: Sequence[keras.metrics.Metric], communicator: Communicator
) -> Iterator[None]:
    """Gives metrics the sum of the states of all ranks inside the block; every rank enters it.

    The sums are float64, then rounded to the type of the state. After the block, each rank has its
    own states again.

    Args:
      metrics: Metrics with summable states, the same on all ranks.
      communicator: Connects the ranks.
    """
    variables = [variable for metric in metrics for variable in metric.variables]
    own_values = [variable.numpy() for variable in variables]
    if variables and communicator.size > 1:
        vector = np.concatenate([np.ravel(value).astype(np.float64) for value in own_values])
        total = communicator.allreduce_sum(tf.constant(vector), "metrics").numpy()
        ends = np.cumsum([value.size for value in own_values])
        for variable, value, part in zip(
            variables, own_values, np.split(total, ends[:-1]), strict=True
        ):
            variable.assign(part.reshape(value.shape).astype(value.dtype))
    try:
        yield
    finally:
        for variable, value in zip(variables, own_values, strict=True):
            variable.assign(value)


def metric_results(model: keras.Model) -> dict[str, Any]:
    """Returns the results of a model's metrics, without a loss that its steps do not record."""
    results: dict[str, Any] = dict(model.get_metrics_result())
    # A `train_step` or `test_step` of the user's own need not use the tracker of Keras. It may have
    # a metric with the same name, whose result Keras takes then, because it comes later.
    trackers = [metric for metric in single_metrics(model.metrics) if metric.name == "loss"]
    count = getattr(trackers[-1], "count", None) if trackers else None
    if count is not None and not float(count):
        results.pop("loss", None)
    return results
