"""Short trainings by the library whose exact results must not change.

Each calls `model.fit` with `hi.DistributedOptimizer` and `default_callbacks` on every rank of a
pool, or takes the same steps in a custom loop. The network has batch normalization, whose
statistics are merged, and dropout, whose masks differ between ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

import hybrid_imagenet as hi
from tests.library import models, programs

EPOCHS = 4
WARMUP_EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class GuardedFit:
    """A training by the library whose result is guarded.

    Attributes:
      optimizer: Makes the optimizer.
      policy: Keras's dtype policy.
      is_interrupted: Whether the run is interrupted in its third epoch and then resumed.
      is_custom_loop: Whether a custom loop takes the steps instead of `fit`.
    """

    optimizer: Callable[[], Any]
    policy: str = "float32"
    is_interrupted: bool = False
    is_custom_loop: bool = False


def _hybrid():
    schedule = hi.schedules.hybrid(0.5, EPOCHS, warmup_epochs=WARMUP_EPOCHS)
    return hi.DistributedOptimizer(hi.optimizers.Hybrid(adabound_lr=0.05), schedule=schedule)


def _lars_accumulated():
    schedule = hi.schedules.polynomial(0.5, EPOCHS, warmup_epochs=WARMUP_EPOCHS)
    # An epoch has four steps, so every epoch ends within an accumulation.
    return hi.DistributedOptimizer(
        hi.optimizers.LARS(0.5), schedule=schedule, gradient_accumulation_steps=3
    )


def _keras_adamw():
    import keras

    return hi.DistributedOptimizer(keras.optimizers.AdamW(0.02, global_clipnorm=1.0))


def _sgd():
    return hi.DistributedOptimizer(hi.optimizers.SGD(0.1, momentum=0.9))


RUNS = {
    "fit-hybrid": GuardedFit(_hybrid),
    "fit-hybrid-resumed": GuardedFit(_hybrid, is_interrupted=True),
    "fit-accumulation3": GuardedFit(_lars_accumulated),
    "fit-accumulation3-resumed": GuardedFit(_lars_accumulated, is_interrupted=True),
    "fit-keras-adamw": GuardedFit(_keras_adamw),
    "fit-keras-adamw-resumed": GuardedFit(_keras_adamw, is_interrupted=True),
    "fit-float16": GuardedFit(_sgd, "mixed_float16"),
    "fit-float16-resumed": GuardedFit(_sgd, "mixed_float16", is_interrupted=True),
    "loop": GuardedFit(_sgd, is_custom_loop=True),
    "loop-float16": GuardedFit(_sgd, "mixed_float16", is_custom_loop=True),
}


def digest(name: str, run_dir: str) -> str:
    """Trains a run of `RUNS`; returns a digest of its results on rank 0, else an empty string."""
    import keras
    import tensorflow as tf

    run = RUNS[name]
    with programs.ranks():
        tf.config.experimental.enable_op_determinism()
        keras.config.set_dtype_policy(run.policy)
        if run.is_interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                _fit(run, run_dir, _interruption())
            # Rank 0 may still write its checkpoint.
            hi.communicator().barrier()
        model, history = _loop(run) if run.is_custom_loop else _fit(run, run_dir)
        is_first_rank = hi.rank() == 0
    return _results_digest(model, history) if is_first_rank else ""


def _model(run: GuardedFit):
    """Returns the compiled network, with other weights on each rank until they are broadcast."""
    import keras

    keras.utils.set_random_seed(3 + hi.rank())
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.25),
            layers.Dense(3, dtype="float32"),
        ]
    )
    model.compile(run.optimizer(), models.loss(), metrics=["accuracy"])
    return model


def _shard():
    return hi.data.shard(models.data(hi.size()), hi.rank(), hi.size())


def _interruption():
    """Returns a callback that fails on all ranks in the third epoch."""
    import keras

    class Interruption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    return Interruption()


def _fit(run: GuardedFit, run_dir: str, *callbacks: Any) -> tuple[Any, list]:
    """Returns the trained model, and what `fit` has logged after the interruption."""
    model = _model(run)
    x, y = _shard()
    checkpoint = hi.callbacks.Checkpoint(pathlib.Path(f"{run_dir}-checkpoints"))
    history = model.fit(
        x,
        y,
        models.BATCH,
        EPOCHS,
        verbose=0,
        callbacks=[*hi.callbacks.default_callbacks(), checkpoint, *callbacks],
        validation_data=(x, y),
        shuffle=False,
    ).history
    # A resumed run has logged only these epochs.
    return model, [{key: values[-2:] for key, values in history.items()}]


def _loop(run: GuardedFit) -> tuple[Any, list]:
    """Returns the model that a custom loop has trained, and its losses."""
    import tensorflow as tf

    model = _model(run)
    hi.broadcast_model(model)
    loss_of = models.loss()
    x, y = _shard()

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
            scaled_loss = model.optimizer.scale_loss(loss)
        model.optimizer.apply(tape.gradient(scaled_loss, model.trainable_variables))
        return loss

    losses = []
    for _ in range(EPOCHS):
        for start in range(0, len(x), models.BATCH):
            batch = slice(start, start + models.BATCH)
            losses.append(float(step(tf.constant(x[batch]), tf.constant(y[batch]))))
    return model, losses


def _results_digest(model: Any, history: list) -> str:
    """Returns a digest of the model's weights, the optimizer's state and the logs.

    The names and the order of the arrays do not matter.
    """
    arrays = []
    for variable in [*model.weights, *model.optimizer.variables]:
        array = np.ascontiguousarray(variable.numpy())
        # These are weights, slots and statistics.
        if array.dtype.kind == "f" and array.size > 1:
            content = hashlib.sha256(array.tobytes()).hexdigest()
            arrays.append(f"{array.dtype} {array.shape} {content}")
    loss_scale = model.optimizer.loss_scale
    counts = [int(model.optimizer.iterations), int(loss_scale.skipped_steps)]
    results = [sorted(arrays), counts, float(loss_scale.scale), history]
    text = json.dumps(results, sort_keys=True, default=float)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
