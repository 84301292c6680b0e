"""Evaluates a Keras model on the examples of all ranks."""

from __future__ import annotations

import logging
import re
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.callbacks import metric_sums
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.comm.agreement import check_agreement, digest
from hybrid_imagenet.errors import SharedError, UserError
from hybrid_imagenet.order.same_order import check_same_order
from hybrid_imagenet.resilience.watchdog import record_progress

_log = logging.getLogger(__name__)

_TERMINAL_STYLE = re.compile(r"\x1b\[[0-9;]*m")
# Beginnings of the paragraphs of an error that do not say what is wrong.
_SURROUNDINGS = (
    "Exception encountered when calling",
    "Arguments received by",
    "Graph execution error",
    "Detected at node",
    'File "',
)


class _BatchCounter(keras.callbacks.Callback):
    """Counts the calls of the test function, and records them as progress of a `fit` around them.

    Keras does not call the callbacks of `fit` here, so its watchdog would see a rank that hangs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.calls += 1
        record_progress()


def evaluate(
    model: keras.Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    **arguments: Any,
) -> dict[str, float | np.ndarray]:
    """Evaluates a model and returns the results over the examples of all ranks.

    Each rank passes its own part of the data, as to `model.evaluate`, which sees that part alone.
    Here the sums and counts of all ranks are added before the results are computed, so each example
    counts equally, even if ranks have different numbers of them. All ranks return the same results.

    Example:
      test = hi.data.shard((x_test, y_test), hi.rank(), hi.size(), remainder="keep")
      print(hi.evaluate(model, *test, batch_size=64))

    Args:
      model: A compiled model whose weights are equal on all ranks, as they are after `fit`. After a
        custom loop, call `hi.merge_batch_norm_statistics(model)` first.
      x: Inputs, or a `tf.data.Dataset` or `PyDataset` of batches. A rank may have no example, as
        with fewer batches than ranks, unless `x` is a `PyDataset` or the model runs eagerly.
      y: Targets (default: None, if `x` has them).
      batch_size: Examples in a batch of this rank (default: None, 32, or the batches of `x`).
      verbose: Verbosity of rank 0, whose progress bar shows the results of rank 0 alone (default:
        "auto").
      sample_weight: Weights of this rank's examples (default: None, each counts equally).
      steps: Largest number of batches of this rank (default: None, all).
      callbacks: Callbacks of Keras, for this rank (default: None).
      **arguments: Others of `model.evaluate`.

    Returns:
      Loss and metrics by name, as `model.evaluate(..., return_dict=True)`.

    Raises:
      UserError: On all ranks, if a rank fails, no rank has a batch, weights or statistics differ,
        or a value cannot be computed over ranks: the state of a metric of your own class is not
        known to be a sum (set its attribute `sums_over_ranks = True` if it is), or a `test_step`
        returns a value that is not a metric's.
    """
    # The result is always a dictionary.
    arguments.pop("return_dict", None)
    arguments |= {
        "batch_size": batch_size,
        "verbose": verbose,
        "sample_weight": sample_weight,
        "steps": steps,
        "callbacks": callbacks,
    }
    communicator = process.communicator()
    if communicator.size == 1:
        alone: dict[str, float | np.ndarray] = model.evaluate(x, y, return_dict=True, **arguments)
        return alone
    check_same_order(communicator)
    _check_equal_weights(model, communicator)
    # No rank waits for another one until all of them have left this block.
    with communicator.raise_on_all_ranks():
        own_results = _evaluate_own_part(model, x, y, arguments)
        metrics = _summable_metrics(model, own_results)
    shapes = [list(variable.shape) for metric in metrics for variable in metric.variables]
    check_agreement(
        communicator,
        {"the shapes of metrics": shapes},
        "after evaluate",
        "compile the same model with the same metrics on every rank",
    )
    names = _result_names(communicator, own_results)
    with metric_sums.summed_over_ranks(metrics, communicator):
        results = metric_sums.metric_results(model)
        # Inside the block, because a result may be the state itself.
        return {name: _as_number_or_array(results[name]) for name in names}


def _check_equal_weights(model: keras.Model, communicator: Communicator) -> None:
    """Raises SharedError if a weight differs between ranks, such as a moving average."""
    check_agreement(
        communicator,
        {"weights": digest(model.trainable_weights)},
        "before evaluate",
        "call hybrid_imagenet.broadcast_model(model) on every rank first",
    )
    check_agreement(
        communicator,
        {"weights that are not trained": digest(model.non_trainable_weights)},
        "before evaluate",
        "call hybrid_imagenet.merge_batch_norm_statistics(model) on every rank first, or for layers"
        " of your own hybrid_imagenet.broadcast_model(model), which takes the values of rank 0",
    )


def _result_names(communicator: Communicator, own_results: dict[str, Any]) -> list[str]:
    """Returns the names of the results; a rank without a batch gets them from another one.

    Raises:
      UserError: If no rank has a batch.
    """
    for names in communicator.allgather_object(list(own_results)):
        if names:
            return list(names)
    raise SharedError("evaluate: no rank has a batch. Pass at least one example to one rank.")


def _evaluate_own_part(
    model: keras.Model, x: Any, y: Any, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Returns the results of this rank's part by Keras's `evaluate`; {} if it has no batch."""
    rank = process.rank()
    counter = _BatchCounter()
    passed = dict(arguments)
    # Keras accepts a single callback, too.
    passed["callbacks"] = [*keras.tree.flatten(passed.get("callbacks") or []), counter]
    if rank != 0:
        passed["verbose"] = 0
    try:
        results: dict[str, Any] = model.evaluate(x, y, return_dict=True, **passed)
    except UserError:
        raise
    except Exception as error:
        # The other ranks get one line; the traceback is of use on this rank only.
        _log.exception("evaluate failed on rank %d", rank)
        raise UserError(
            f"evaluate failed: {type(error).__name__}: {reason_of(error)} (the traceback is above)"
        ) from error
    if counter.calls:
        return results
    # Keras has traced the test function, which has built the metrics. It may also have counted a
    # batch of a fixed size before it noticed that there is none. With states of zero, this rank
    # adds nothing to the sums.
    model.reset_metrics()
    return {}


def reason_of(error: Exception) -> str:
    """Returns the line of an error of Keras or TensorFlow that says what is wrong.

    Keras writes in bold, and adds which layer was called and its arguments. TensorFlow adds where
    the operation was created.
    """
    text = _TERMINAL_STYLE.sub("", str(error))
    for paragraph in text.split("\n\n"):
        if paragraph.strip() and not paragraph.lstrip().startswith(_SURROUNDINGS):
            return paragraph.strip().splitlines()[0]
    return text.strip()


def _summable_metrics(
    model: keras.Model, own_results: dict[str, Any]
) -> list[keras.metrics.Metric]:
    """Returns the metrics of a model, all of which can be summed over ranks.

    Raises:
      UserError: If a metric, or a value of a `test_step`, cannot be.
    """
    metrics = list(metric_sums.single_metrics(model.metrics))
    for metric in metrics:
        if not metric_sums.has_summable_state(metric):
            raise UserError(
                f"evaluate: the states of metric {metric.name!r} of class {type(metric).__name__}"
                " may not be sums, so they cannot be added over ranks. Derive the class from a"
                " metric of Keras, such as keras.metrics.Mean, or set its attribute"
                " sums_over_ranks = True if its states are sums."
            )
    metric_names = metric_sums.metric_results(model).keys()
    unknown = [name for name in own_results if name not in metric_names]
    if unknown:
        raise UserError(
            f"evaluate: {', '.join(unknown)} of the model's test_step is not the result of a"
            " metric, so it cannot be computed over ranks. Return the results of metrics, such as"
            " keras.metrics.Mean."
        )
    return metrics


def _as_number_or_array(value: Any) -> float | np.ndarray:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array
