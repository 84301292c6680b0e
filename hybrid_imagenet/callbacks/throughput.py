"""Logs how fast `fit` trains, and for how long it waits for data."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.training_run import FitRun


class Throughput(TrainingCallback):
    """Adds the throughput of each epoch of `fit` to its logs.

    * `examples_per_second`: examples of all ranks. It is missing if the model has its own
      `train_step` that does not update Keras's loss.
    * `data_wait`: share of the time in which the ranks waited for data, a fraction, the mean over
      ranks.

    Validation and the first step, which compiles, are not counted. Both values are NaN in an epoch
    that has no other step. Pass it on every rank, before callbacks that write the logs. No step
    waits for a value. Timing the data costs each step a fraction of a millisecond of CPU time.

    Example:
      callbacks = [
          hi.callbacks.Throughput(),
          *hi.callbacks.default_callbacks(keras.callbacks.CSVLogger("log.csv")),
      ]
    """

    # `fit` has made it.
    run: FitRun

    def __init__(self) -> None:
        super().__init__()
        with tf.device("CPU:0"):
            self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="waited")
        self._source: tf.data.Dataset | None = None
        self._timed: tf.data.Dataset | None = None
        self._is_compiled = False
        self._results: dict[str, float] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins a session, whose first step compiles."""
        self._is_compiled = False
        # After all others, because `Checkpoint` sets the data of an epoch too.
        last = len(private_api.running_callbacks())
        at_epoch_begin = keras.callbacks.LambdaCallback(on_epoch_begin=self._begin_epoch)
        private_api.insert_callback(at_epoch_begin, last)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._results = {}
        self._began: float | None = None

    def _begin_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Makes the data of the epoch count the time for which they are waited for."""
        data = private_api.RunningFitData()
        if data.dataset is not self._timed:
            if data.dataset is not self._source:
                self._source = data.dataset
                self._timed = self._time(data.dataset)
            data.set_epoch(self._timed, data.num_batches)
        if self._is_compiled:
            self._start_clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._began is None:
            self._is_compiled = True
            self._start_clock()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock before validation inside `fit`."""
        self._stop_clock()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the throughput to the logs; every rank calls it."""
        self._stop_clock()
        results_of_ranks = self.communicator.allgather_object(self._results)
        if logs is None:
            return
        if not all(results_of_ranks):
            # `CSVLogger` takes its columns from the first epoch.
            tracker = private_api.loss_tracker(self.model)
            if tracker is not None and float(tracker.count):
                logs["examples_per_second"] = math.nan
            logs["data_wait"] = math.nan
            return
        seconds = max(results["seconds"] for results in results_of_ranks)
        examples = sum(results["examples"] for results in results_of_ranks)
        waits = [results["waited"] / results["seconds"] for results in results_of_ranks]
        if examples:
            logs["examples_per_second"] = examples / seconds
        logs["data_wait"] = sum(waits) / len(waits)

    def _start_clock(self) -> None:
        self._began = time.perf_counter()
        self._batches_before = self.run.batches
        self._waited_before = float(self._waited.numpy())

    def _stop_clock(self) -> None:
        """Measures the epoch, unless it is measured or had no step to measure."""
        if self._results or self._began is None or self.run.batches == self._batches_before:
            return
        tracker = private_api.loss_tracker(self.model)
        # Reading it waits until the device has finished the epoch. It counts examples.
        count = 0.0 if tracker is None else float(tracker.count)
        batches = self.run.batches
        self._results = {
            "seconds": time.perf_counter() - self._began,
            "examples": count * (batches - self._batches_before) / batches,
            "waited": float(self._waited.numpy()) - self._waited_before,
        }

    def _time(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset, which adds the seconds that each element takes to a variable.

        The three parts of an element are computed one after the other when it is asked for. So the
        difference of the clocks is the time for which the element before them was waited for.
        """
        clock = tf.data.Dataset.range(1).repeat().map(lambda _: tf.timestamp())

        def add_difference(began: tf.Tensor, element: Any, ended: tf.Tensor) -> Any:
            with tf.control_dependencies([self._waited.assign_add(ended - began)]):
                return tf.nest.map_structure(tf.identity, element)

        return tf.data.Dataset.zip((clock, dataset, clock)).map(add_difference)
