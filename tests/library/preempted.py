"""Trains with `fit` and `Checkpoint` on data of several kinds, and may be preempted or killed.

As a program it has the arguments KIND FOLDER, and prints one line per epoch. Rank 0 writes the
final values of all variables to FOLDER/final.npz. In the last rank's batch number AT, counted from
1 over all epochs (default: 0, never), it sends itself the signal SIGNAL, at once or LATER seconds
later. EVERY is the argument `every_seconds`. AT, SIGNAL, LATER and EVERY are environment variables.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.errors import EXIT_PREEMPTED
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from tests.library import programs

EXAMPLES = 120
BATCH = 4
EPOCHS = 3
BATCHES_OF_TWO_RANKS = EXAMPLES // 2 // BATCH
KINDS = ("arrays", "unshuffled", "pydataset", "workers", "order", "accumulation", "executions")


class Batches(keras.utils.PyDataset):
    """Batches of a rank."""

    def __init__(self, x, y, **options):
        super().__init__(**options)
        self._x = x
        self._y = y

    def __len__(self):
        return len(self._x) // BATCH

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self._x[part], self._y[part]


class Reordered(Batches):
    """Batches that may be others in each epoch."""

    def on_epoch_begin(self):
        pass


class Mean(keras.layers.Layer):
    """Has a metric of its own: the mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="input_mean")

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


class Note(keras.callbacks.Callback):
    """Keeps the logs of epochs, and calls a function before a batch.

    Attributes:
      epochs: Logs of each epoch, by its number.
    """

    def __init__(self, at=0, action=None):
        super().__init__()
        self.epochs = {}
        self._at = at
        self._action = action
        self._count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self._count += 1
        if self._count == self._at:
            self._action()

    def on_epoch_end(self, epoch, logs=None):
        self.epochs[epoch] = {name: float(value) for name, value in logs.items()}


class Center(keras.layers.Layer):
    """Subtracts a moving average of the inputs, which is a weight of each rank."""

    def build(self, shape):
        self.center = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            mean = keras.ops.mean(inputs, axis=0)
            self.center.assign(0.8 * self.center + 0.2 * mean)
        return inputs - self.center


def model_with_statistics():
    """Returns a model with batch normalization, dropout and a layer's metric."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            Mean(),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )


def model_with_states():
    """Returns a model of which two layers keep states that differ between ranks."""
    return keras.Sequential(
        [
            keras.Input(batch_shape=(BATCH, 6)),
            Center(),
            keras.layers.Reshape((2, 3)),
            keras.layers.GRU(4, stateful=True),
            keras.layers.Dense(1),
        ]
    )


def compiled(kind):
    """Returns a model with statistics and random numbers of each rank."""
    keras.utils.set_random_seed(7)
    model = model_with_states() if kind == "states" else model_with_statistics()
    optimizer = hi.DistributedOptimizer(
        hi.optimizers.SGD(0.05),
        schedule=None if kind == "unknown length" else hi.schedules.cosine(0.05, EPOCHS),
        gradient_accumulation_steps=3 if kind == "accumulation" else None,
    )
    model.compile(
        optimizer,
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.AUC(from_logits=True, name="auc")],
        steps_per_execution=2 if kind == "executions" else 1,
    )
    return model


def arrays():
    """Returns the examples of all ranks."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 6)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)


def fit(kind, folder, at=0, action=None, epochs=EPOCHS, *, batch_size=BATCH, **options):
    """Trains; returns the values of all variables by number, and the logs of epochs.

    Args:
      kind: One of `KINDS`, or "tf.data".
      folder: Directory of the checkpoints.
      at: Number of the batch before which `action` is called.
      action: Function without arguments.
      epochs: Number of epochs.
      batch_size: Examples in a batch of arrays.
      **options: Options of `Checkpoint`.
    """
    model = compiled(kind)
    x, y = hi.data.shard(arrays(), hi.rank(), hi.size())
    callbacks = hi.callbacks.default_callbacks()
    arguments = {"x": x, "y": y, "batch_size": batch_size}
    if kind == "unshuffled":
        arguments["shuffle"] = False
    elif kind in ("pydataset", "workers"):
        workers = {"workers": 2} if kind == "workers" else {}
        arguments = {"x": Batches(x, y, **workers)}
    elif kind == "order":
        x, y = arrays()
        note_examples = options.pop("note_examples", lambda indices: None)

        def load(indices):
            note_examples(indices)
            return x[indices], y[indices]

        sampler = hi.order.ExactBatchSampler(
            EXAMPLES, BATCH, seed=1, rank=hi.rank(), size=hi.size()
        )
        dataset = hi.order.keras_dataset(sampler, load)
        arguments = {"x": dataset, "shuffle": False}
        callbacks.append(dataset.counter)
        options["order"] = sampler
    elif kind == "tf.data":
        arguments = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}
    elif kind == "unknown length":
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        arguments = {"x": dataset.filter(lambda x, y: True)}
    elif kind == "steps_per_epoch":
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        arguments = {"x": dataset, "steps_per_epoch": 20}
    elif kind == "own order":
        arguments = {"x": Reordered(x, y)}
    note = Note(at, action)
    callbacks += [note, hi.callbacks.Checkpoint(folder, **options)]
    model.fit(**arguments, epochs=epochs, verbose=0, callbacks=callbacks)
    values = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    return values, note.epochs


def ask_to_stop():
    """Does what a signal does."""
    REQUESTS.stop = True


def fit_preempted(kind, folder, at, **options):
    """Trains until a request to stop before a batch; the process would exit with code 75."""
    try:
        fit(kind, folder, at, ask_to_stop, **options)
    except SystemExit as error:
        assert error.code == EXIT_PREEMPTED
    else:
        raise AssertionError("fit was not preempted")
    finally:
        REQUESTS.end()


def interrupt():
    """Ends a `fit` that has saved its checkpoint."""
    raise KeyboardInterrupt


def compare_states_on_ranks(folder):
    """Returns whether a model with states of each rank continues with the same result.

    It is interrupted in the first batch of an epoch, and in the middle of one.
    """
    batches = BATCHES_OF_TWO_RANKS
    equal = []
    with programs.ranks():
        whole, _ = fit("states", pathlib.Path(folder) / "whole")
        for at in (batches + 1, batches + 6):
            again = pathlib.Path(folder) / f"again{at}"
            with contextlib.suppress(KeyboardInterrupt):
                fit("states", again, at, interrupt, every_seconds=1e-9)
            resumed, _ = fit("states", again)
            equal.append(all(map(np.array_equal, resumed, whole)))
    return equal


def compare_on_ranks(kind, folder):
    """Returns whether a `fit` that the last rank has ended continues with the same result."""
    with programs.ranks():
        whole = fit(kind, pathlib.Path(folder) / "whole")
        again = pathlib.Path(folder) / "again"
        is_last = hi.rank() == hi.size() - 1
        fit_preempted(kind, again, 5 if is_last else 0)
        resumed = fit(kind, again)
        are_equal = [
            bool(np.array_equal(value, other))
            for value, other in zip(resumed[0], whole[0], strict=True)
        ]
        return {"equal": all(are_equal), "logs": resumed[1] == whole[1]}


def interrupted_then_earlier_checkpoint(folder):
    """Trains twice with the same callback; returns the epochs of the second `fit`.

    The first `fit` is interrupted after a checkpoint inside its second epoch. That checkpoint is
    deleted, so the second one begins after the first epoch.
    """
    directory = pathlib.Path(folder) / "checkpoints"

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.params["epochs"] == 2 and self.epoch == 1 and batch == 3:
                raise KeyboardInterrupt

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    with programs.ranks():
        model = compiled("arrays")
        x, y = hi.data.shard(arrays(), hi.rank(), hi.size())
        note = Note()
        checkpoint = hi.callbacks.Checkpoint(directory, every_seconds=1e-9, keep=100)
        callbacks = [*hi.callbacks.default_callbacks(), note, checkpoint, Interrupt()]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, y, BATCH, 2, 0, callbacks)
        REQUESTS.end()
        if hi.rank() == 0:
            checkpoint._store.wait()
            steps = len(x) // BATCH
            for path in directory.glob("step-*.npz"):
                if int(path.stem.removeprefix("step-")) > steps:
                    path.unlink()
        hi.communicator().barrier()
        note.epochs.clear()
        model.fit(x, y, BATCH, 3, 0, callbacks)
        return sorted(note.epochs)


def examples_trained(folder, at):
    """Trains an epoch in an exact order; returns the examples of this rank that it has trained.

    Args:
      folder: Directory of the checkpoints, for all jobs.
      at: Number of the batch before which the last rank asks to stop; 0 for the whole epoch.
    """
    loaded = []
    with programs.ranks():
        options = {"epochs": 1, "note_examples": lambda indices: loaded.append(indices.tolist())}
        if at:
            is_last = hi.rank() == hi.size() - 1
            fit_preempted("order", folder, at if is_last else 0, **options)
            batches = at
        else:
            fit("order", folder, **options)
            batches = len(loaded)
    # Keras reads two batches to learn their types, and later batches ahead.
    return [example for batch in loaded[2 : 2 + batches] for example in batch]


def send_signal():
    """Sends this process the signal of the environment.

    Without LATER, it waits until the thread that handles signals has done so. With LATER, training
    goes on, so that the signal comes in the middle of a step or of a save.
    """
    number = getattr(signal, os.environ["SIGNAL"])
    if "LATER" in os.environ:
        timer = threading.Timer(float(os.environ["LATER"]), os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
    else:
        os.kill(os.getpid(), number)
        time.sleep(0.3)


def main():
    """Trains with the arguments of the command line."""
    kind, folder = sys.argv[1:]
    hi.init()
    at = int(os.environ.get("AT", "0"))
    is_last = hi.rank() == hi.size() - 1
    every_seconds = float(os.environ.get("EVERY", "600"))
    checkpoints = pathlib.Path(folder) / "checkpoints"
    values, epochs = fit(
        kind, checkpoints, at if is_last else 0, send_signal, every_seconds=every_seconds
    )
    if hi.rank() == 0:
        np.savez(pathlib.Path(folder) / "final.npz", *values)
        for epoch, logs in epochs.items():
            print(f"epoch {epoch}: {sorted(logs.items())}", flush=True)


if __name__ == "__main__":
    main()
