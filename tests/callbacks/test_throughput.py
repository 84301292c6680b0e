"""The throughput of `fit` and its wait for data, in the logs of epochs."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from tests.library import models, programs

BATCHES = 12


def slow_steps(seconds):
    """Returns a callback that makes each step slower."""
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(seconds)
    )


def slow_batches(seconds):
    """Returns batches of 4 examples, each of which takes some time to read."""
    x, y = models.vectors(4 * BATCHES)

    def wait(x, y):
        time.sleep(seconds)
        return x, y

    def read(x, y):
        x_read, y_read = tf.numpy_function(wait, [x, y], [tf.float32, tf.int32])
        x_read.set_shape([4, 6])
        y_read.set_shape([4])
        return x_read, y_read

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4).map(read)


def fit(*data, before=(), after=(), **options):
    """Trains three epochs; returns the history."""
    keras.utils.set_random_seed(1)
    model = models.compiled(hi.DistributedOptimizer("sgd"))
    callbacks = [hi.callbacks.Throughput(), *before, *hi.callbacks.default_callbacks(), *after]
    return model.fit(*data, epochs=3, verbose=0, callbacks=callbacks, **options).history


def test_throughput_of_slow_steps_waits_for_no_data(tmp_path):
    x, y = models.vectors(4 * BATCHES)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = fit(x, y, 4, before=[slow_steps(0.05)], after=[log], validation_data=(x, y))
    # Four examples in more than 50 ms. The sleep of the first batch comes after the clock starts.
    assert all(10 < rate < 4 / 0.04 for rate in history["examples_per_second"])
    assert all(0 <= share < 0.2 for share in history["data_wait"])
    header = (tmp_path / "log.csv").read_text().splitlines()[0]
    assert "data_wait,examples_per_second" in header


def test_throughput_of_slow_data_waits_most_of_the_time():
    history = fit(slow_batches(0.05))
    assert all(10 < rate < 4 / 0.04 for rate in history["examples_per_second"])
    assert all(0.6 < share <= 1 for share in history["data_wait"])


def test_throughput_with_checkpoint_times_the_data_that_are_left(tmp_path):
    x, y = models.vectors(4 * BATCHES)
    whole = fit(x, y, 4, after=[hi.callbacks.Checkpoint(tmp_path / "whole")])
    assert len(whole["data_wait"]) == 3
    assert whole["loss"] == fit(x, y, 4, after=[hi.callbacks.Checkpoint(tmp_path / "b")])["loss"]


def test_epoch_without_a_step_to_measure_has_the_same_columns(tmp_path):
    x, y = models.vectors(4 * BATCHES)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = fit(x, y, 4 * BATCHES, after=[log])
    for name in ("examples_per_second", "data_wait"):
        first, *others = history[name]
        assert np.isnan(first)
        assert np.isfinite(others).all()
    assert "data_wait,examples_per_second" in (tmp_path / "log.csv").read_text()


def test_throughput_of_an_own_train_step_omits_examples():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
                )
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = Model()
    model.compile(hi.DistributedOptimizer("sgd"))
    x, y = models.vectors(4 * BATCHES)
    callbacks = [hi.callbacks.Throughput(), *hi.callbacks.default_callbacks()]
    history = model.fit(x, y, 4, 2, 0, callbacks).history
    assert "examples_per_second" not in history
    assert len(history["data_wait"]) == 2


def test_throughput_on_two_ranks_counts_the_examples_of_both(pools):
    first, second = pools[2].call(programs.throughput)
    assert first == second
    assert 2 * 4 / 0.2 < np.mean(first["examples_per_second"]) < 2 * 4 / 0.04


def test_throughput_on_rank_zero_alone_is_rejected():
    with pytest.raises(hi.UserError, match="Throughput communicates"):
        hi.callbacks.default_callbacks(hi.callbacks.Throughput())
