"""Programs of `hi.evaluate`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np

import hybrid_imagenet as hi
from hybrid_imagenet.resilience.watchdog import Watchdog
from tests.comm.programs import message
from tests.library import models
from tests.library.programs import ranks

EXAMPLES = 13


class Perplexity(keras.metrics.Mean):
    """The exponential of a mean, which differs from the mean of exponentials."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        super().update_state(losses, sample_weight=sample_weight)

    def result(self) -> Any:
        return keras.ops.exp(super().result())


class Largest(keras.metrics.Metric):
    """The largest output, whose state is not a sum."""

    def __init__(self, sums_over_ranks: bool | None = None) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")
        self.sums_over_ranks = sums_over_ranks

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


class OwnTestStep(keras.Sequential):
    """Returns a value that is not the result of a metric."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        return {"mean output": keras.ops.mean(self(x))}


def compiled(*metrics: Any, weighted: bool = False, seed: int = 3) -> keras.Model:
    """Returns a model with a loss that depends on its weights too."""
    model = models.plain(seed)
    model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
    names = {"weighted_metrics": [*metrics]} if weighted else {"metrics": [*metrics]}
    model.compile(loss=models.loss(), **names)
    return model


def examples(first: int, last: int) -> list[np.ndarray]:
    """Returns a part of all inputs, classes and sample weights."""
    x, y = models.vectors(EXAMPLES)
    weights = np.linspace(0.2, 2.0, EXAMPLES).astype(np.float32)
    return [x[first:last], y[first:last], weights[first:last]]


def vector_metrics() -> list[Any]:
    """Returns metrics whose results are not means over examples, one of them a vector."""
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")
    matrix = keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")
    return ["accuracy", top, matrix, Perplexity(name="perplexity")]


def results(model: keras.Model, first: int, last: int, evaluate: Any) -> dict[str, Any]:
    """Evaluates a part of the examples as arrays with sample weights."""
    x, y, weights = examples(first, last)
    return evaluate(model, x, y, sample_weight=weights, batch_size=4, verbose=0)


def on_rank() -> dict[str, Any]:
    """Results of two ranks with three batches and one, and the messages of errors."""
    with ranks():
        place = [(0, 10), (10, EXAMPLES)][hi.rank()]
        x, y, _ = examples(*place)
        wrong = x[:, :2] if hi.rank() == 1 else x
        everything_on_rank_0 = [(0, EXAMPLES), (EXAMPLES, EXAMPLES)][hi.rank()]
        own_step = OwnTestStep([keras.Input((6,)), keras.layers.Dense(3)])
        own_step.compile(loss="mse")
        hi.broadcast_model(own_step)
        return {
            "results": results(compiled(*vector_metrics()), *place, hi.evaluate),
            "weighted": results(compiled(*vector_metrics(), weighted=True), *place, hi.evaluate),
            "declared": hi.evaluate(compiled(Largest(True)), x, y, verbose=0)["largest"],
            "own largest": float(np.max(compiled().predict(x, verbose=0), initial=0)),
            "one rank fails": message(lambda: hi.evaluate(compiled(), wrong, y, verbose=0)),
            "second rank empty": results(
                compiled(*vector_metrics()), *everything_on_rank_0, hi.evaluate
            ),
            "both ranks empty": message(lambda: hi.evaluate(compiled(), x[:0], y[:0], verbose=0)),
            "not a sum": message(lambda: hi.evaluate(compiled(Largest()), x, y, verbose=0)),
            "not a metric": message(lambda: hi.evaluate(own_step, x, y, verbose=0)),
            "other weights": message(lambda: hi.evaluate(compiled(seed=hi.rank()), x, y)),
            "statistics": statistics(x, y),
            "progress": progress_in_fit(),
        }


def progress_in_fit() -> list[int]:
    """Returns how often the watchdog of `fit` sees progress in evaluations inside a callback."""
    x, y = models.data(1)
    counts = []

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with mock.patch.object(Watchdog, "record_progress") as record:
                hi.evaluate(self.model, x, y, models.BATCH, 0)
            counts.append(record.call_count)

    model = models.compiled(hi.DistributedOptimizer("sgd"))
    model.fit(x, y, models.BATCH, 2, 0, [*hi.callbacks.default_callbacks(), Evaluate()])
    return counts


def statistics(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Evaluates after each rank has normalized its own batch, before and after the merge."""
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((6,)), norm, models.plain(3)])
    model.compile(loss=models.loss())
    hi.broadcast_model(model)
    model(x, training=True)
    before = [norm.moving_mean.numpy().tolist(), norm.moving_variance.numpy().tolist()]
    error = message(lambda: hi.evaluate(model, x, y, verbose=0))
    hi.merge_batch_norm_statistics(model)
    after = [norm.moving_mean.numpy().tolist(), norm.moving_variance.numpy().tolist()]
    loss = hi.evaluate(model, x, y, verbose=0)["loss"]
    return {"before": before, "error": error, "after": after, "loss": loss}
