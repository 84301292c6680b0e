"""Programs that the tests of the library run on each rank."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from functools import partial
from unittest import mock

import numpy as np

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import metric_average
from hybrid_imagenet.comm import process
from hybrid_imagenet.comm.process import ENGINE_VARIABLE
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.optimizers import first_step_check
from tests.comm.programs import message
from tests.library import models


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """Connects this process to the other ranks, as a user's program would do."""
    process.shutdown()
    hi.init()
    try:
        yield
    finally:
        import keras

        keras.config.set_dtype_policy("float32")
        process.shutdown()


def weights(model) -> list:
    return [w.astype(float).ravel().tolist() for w in model.get_weights()]


def run_case(name: str, engine: str = "") -> dict:
    """Runs a program of `test_cases` on this rank; `engine` connects the ranks."""
    from tests.library import test_cases
    from tests.library.places import on_rank

    with mock.patch.dict(os.environ, {ENGINE_VARIABLE: engine} if engine else {}), ranks():
        return on_rank(test_cases.PROGRAMS[name])


def throughput() -> dict:
    """Returns the throughput of two epochs with batches of 4 examples in at least 50 ms."""
    import time

    import keras

    with ranks():
        model = models.compiled(hi.DistributedOptimizer("sgd"))
        x, y = models.vectors(48)
        slow = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: time.sleep(0.05)
        )
        callbacks = [hi.callbacks.Throughput(), slow, *hi.callbacks.default_callbacks()]
        history = model.fit(x, y, 4, 2, 0, callbacks).history
        return {name: history[name] for name in ("examples_per_second", "data_wait")}


def overflow() -> dict:
    """Overflows one rank's gradients in the second of three steps of a mixed_float16 model."""
    import keras

    with ranks():
        keras.config.set_dtype_policy("mixed_float16")
        optimizer = hi.DistributedOptimizer("sgd")
        model = models.compiled(optimizer)
        x, y = models.data(1)
        steps = []

        class RecordStep(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                scale = optimizer.loss_scale
                steps.append(
                    [float(scale.scale.numpy()), int(scale.skipped_steps.numpy()), weights(model)]
                )

        x = x[:12] / 10
        if hi.rank() == 1:
            x[4:8] = np.inf
        model.fit(
            x,
            y[:12],
            4,
            shuffle=False,
            verbose=0,
            callbacks=[*hi.callbacks.default_callbacks(), RecordStep()],
        )
        wire = {bucket["wire"] for bucket in optimizer.reducer.statistics()["buckets"]}
        return {"seen": steps, "wrapped": model.optimizer is not optimizer, "wire": sorted(wire)}


def rejections() -> dict:
    """Returns the errors that all ranks get for unsupported uses."""
    with ranks():
        x, y = models.data(1)

        def fit(callbacks=None, x=x, y=y, **compile_arguments):
            model = models.compiled(hi.DistributedOptimizer("sgd"), **compile_arguments)
            model.fit(x, y, 4, verbose=0, callbacks=callbacks)

        def fit_unbuilt_layer():
            import keras

            class OwnStep(keras.Model):
                """Trains a layer that has no weights before its first step."""

                def __init__(self):
                    super().__init__()
                    self.encoder = keras.Sequential([keras.layers.Dense(3, name="late")])
                    self.head = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

                def compile(self, optimizer):
                    super().compile()
                    self.own_optimizer = optimizer

                def train_step(self, data):
                    import tensorflow as tf

                    with tf.GradientTape() as tape:
                        outputs = self.head(self.encoder(tf.reshape(data[0], [4, -1])))
                        loss = tf.reduce_mean(outputs)
                    variables = self.encoder.trainable_weights + self.head.trainable_weights
                    self.own_optimizer.apply(tape.gradient(loss, variables), variables)
                    return {"own": loss}

            model = OwnStep()
            model.compile(hi.DistributedOptimizer("sgd"))
            model.fit(x, y, 4, verbose=0, callbacks=hi.callbacks.default_callbacks())

        def fit_layer_loss():
            import keras

            class AddLoss(keras.layers.Layer):
                """Adds a loss for each example."""

                def call(self, x):
                    self.add_loss(keras.ops.mean(x, axis=1))
                    return x

            model = keras.Sequential([keras.Input((6,)), AddLoss(), keras.layers.Dense(3)])
            model.compile(hi.DistributedOptimizer("sgd"), models.loss())
            model.fit(x, y, 4, verbose=0, callbacks=hi.callbacks.default_callbacks())

        short = slice(0, len(x) - 4 * hi.rank())
        restarted = models.compiled(hi.DistributedOptimizer("sgd"), jit_compile=True)
        xla_error = message(lambda: restarted.fit(x, y, 4, verbose=0))
        # The message advises this call.
        restarted.fit(x, y, 4, verbose=0, callbacks=hi.callbacks.default_callbacks())
        errors = io.StringIO()
        codes = []
        # With TensorFlow's engine the hook ends this process itself.
        with contextlib.redirect_stderr(errors), mock.patch("os._exit", codes.append):
            for error in (SharedError("of all ranks", 3), RuntimeError("of this rank")):
                try:
                    sys.excepthook(type(error), error, None)
                except SystemExit as end:
                    codes.append(end.code)
        return {
            "uncaught": errors.getvalue(),
            "codes": codes,
            "broadcast": message(lambda: fit(seed=3 + hi.rank(), run_eagerly=True)),
            "steps": message(lambda: fit(hi.callbacks.default_callbacks(), x[short], y[short])),
            "unbuilt layer": message(fit_unbuilt_layer),
            "layer loss": message(fit_layer_loss),
            "xla": xla_error,
            "settings": message(lambda: hi.DistributedOptimizer("sgd", fusion_threshold_mb=4)),
        }


def operations_outside_xla() -> dict:
    """Returns the operations outside XLA of a training function whose step XLA compiles."""
    import tensorflow as tf
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext as in_xla  # noqa: N813

    from tests.library import cases

    with ranks():
        with cases.pretended_gpu():
            model = models.compiled(hi.DistributedOptimizer("sgd"))
        x, y = models.data(1)
        traced = []
        with mock.patch.object(
            hi.DistributedOptimizer, "accumulate_or_update", autospec=True
        ) as take:
            take.side_effect = lambda self, grads: traced.append(
                "xla"
                if in_xla(tf.compat.v1.get_default_graph())
                else [g.shape.as_list() for g in grads]
            )
            model.fit(x, y, 4, verbose=0, callbacks=hi.callbacks.default_callbacks())
        return {"jit": bool(model.jit_compile), "traced": traced}


def logs_and_statistics() -> dict:
    """Returns logs of `fit` with unequal batches, and statistics before and after their merge."""
    import keras

    with ranks():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.BatchNormalization(name="bn"), layers.Dense(3)]
        )
        optimizer = hi.DistributedOptimizer(
            hi.optimizers.SGD(0.1), schedule=hi.schedules.polynomial(0.5, 2, warmup_epochs=1)
        )
        model.compile(
            optimizer,
            models.loss(),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
        )
        x, y = models.data(1)
        # Each rank has three steps. The last batch has 4 examples on rank 0 and 2 on rank 1.
        share = slice(0, 10) if hi.rank() else slice(0, 12)
        recorded = {"rates": [], "own": []}

        class Before(keras.callbacks.Callback):
            def on_test_begin(self, logs=None):
                bn = model.get_layer("bn")
                recorded["own"].append(
                    [bn.moving_mean.numpy().tolist(), bn.moving_variance.numpy().tolist()]
                )
                metrics = {name: float(value) for name, value in model.get_metrics_result().items()}
                recorded["metrics"] = [metrics, share.stop]

        class After(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                recorded["rates"].append(float(optimizer.learning_rate))

        standard = [*hi.callbacks.default_callbacks(), After()]
        validation = (x[share], y[share])
        history = model.fit(
            x[share],
            y[share],
            4,
            2,
            0,
            [Before(), *standard],
            validation_data=validation,
            shuffle=False,
        )
        bn = model.get_layer("bn")
        merged = [bn.moving_mean.numpy().tolist(), bn.moving_variance.numpy().tolist()]
        average = hi.callbacks.MetricAverage()
        evaluated = model.evaluate(*validation, verbose=0, return_dict=True, callbacks=[average])
        logs = history.history
        return recorded | {
            "merged": merged,
            "logs": logs,
            "evaluated": [evaluated, share.stop],
            "average": average.results,
        }


def callback_differences() -> dict:
    """Returns the errors of all ranks when a callback changes training on rank 0 alone."""
    import keras

    class Change(keras.callbacks.Callback):
        def __init__(self, change):
            super().__init__()
            self.change = change

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.change(self.model)

    def fit(*changes, validation_data=None, before=(), more=(), rank=0, factor=1.0):
        model = models.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True)
        callbacks = [
            *before,
            *hi.callbacks.default_callbacks(*map(Change, changes)),
            *more,
        ]
        x, y = hi.data.shard(models.data(2), rank, 2)
        x *= np.float32(factor)
        model.fit(
            x, y, models.BATCH, 4, 0, callbacks, validation_data=validation_data, shuffle=False
        )

    def count_warnings(rank, factor=1.0):
        with mock.patch.object(metric_average._log, "warning") as warning:
            message(partial(fit, rank=rank, factor=factor))
        return warning.call_count

    changes = {
        "learning rate": lambda model: setattr(model.optimizer, "learning_rate", 0.5),
        "weights": lambda model: model.trainable_variables[0].assign_add(
            model.trainable_variables[0] * 1e-6
        ),
        "stop": lambda model: setattr(model, "stop_training", True),
    }
    with ranks():
        errors = {name: message(partial(fit, change)) for name, change in changes.items()}
        first = None if hi.rank() else models.data(1)
        both = [keras.callbacks.ModelCheckpoint("never.keras")]
        errors["writers"] = message(partial(fit, more=both))
        early = hi.callbacks.on_rank_zero(keras.callbacks.CSVLogger(os.devnull))
        errors["early writer"] = message(partial(fit, before=early))
        errors["validation"] = message(partial(fit, validation_data=first))
        warnings = [count_warnings(0), count_warnings(hi.rank()), count_warnings(0, np.nan)]
        return errors | {"same data": warnings}


def two_optimizers(folder: str) -> dict:
    """Trains a GAN with two optimizers for four epochs, at once and with a resume after two."""
    import keras

    from tests.library.published import Gan

    with ranks():

        def fit(epochs, seed, *callbacks):
            schedule = hi.schedules.polynomial(0.5, 4)
            inner = [hi.optimizers.SGD(0.1, momentum=0.9), hi.optimizers.SGD(0.1, momentum=0.9)]
            first = hi.DistributedOptimizer(inner[0], schedule=schedule)
            keras.utils.set_random_seed(seed)
            model = Gan(norm=True)
            second = hi.DistributedOptimizer(inner[1], gradient_accumulation_steps=3)
            model.compile(first, second, jit_compile=True)
            x, _ = hi.data.shard(models.data(hi.size()), hi.rank(), hi.size())
            history = model.fit(
                x,
                None,
                models.BATCH,
                epochs,
                0,
                [*hi.callbacks.default_callbacks(), *callbacks],
                shuffle=False,
            ).history
            state = [np.ravel(v.numpy()).tolist() for o in (first, second) for v in o.variables]
            return {"weights": weights(model), "state": state, "rates": history["learning_rate"]}

        checkpoint = hi.callbacks.Checkpoint(f"{folder}/checkpoints")
        fit(2, 3, checkpoint)
        return {"whole": fit(4, 3), "again": fit(4, 3 + hi.rank(), checkpoint)}


def random_layers() -> dict:
    """Returns the numbers that random layers draw on this rank if all ranks have one seed."""
    import keras

    def trained(by_fit: bool) -> tuple[list, list]:
        keras.utils.set_random_seed(0)
        inner = keras.Sequential([keras.Input((6,)), keras.layers.GaussianNoise(1.0)])
        random = [inner, keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((6,)), *random, keras.layers.Dense(2)])
        model.compile(hi.DistributedOptimizer("sgd"), "mse")
        x = np.ones((4, 6), np.float32)
        if by_fit:
            fit = {"batch_size": 2, "epochs": 1, "verbose": 0}
            # The second one begins with another broadcast.
            for _ in range(2):
                model.fit(x, x[:, :2], **fit, callbacks=hi.callbacks.default_callbacks())
        else:
            hi.broadcast_model(model)
        noise = inner(x, training=True).numpy().tolist()
        mask = random[1](x, training=True).numpy().tolist()
        return [noise, mask], weights(model)

    with ranks():
        draws, _ = trained(by_fit=False)
        in_fit, after_fit = trained(by_fit=True)
        second_fit, after_again = trained(by_fit=True)
        return {
            "draws": [draws, in_fit],
            "is_reproducible": (in_fit, after_fit) == (second_fit, after_again),
            "weights": after_fit,
        }


def vectors() -> dict:
    """Returns the history of `fit` with metrics whose results are vectors."""
    import keras

    class Largest(keras.metrics.Metric):
        """A user's metric: the largest output of each class."""

        def __init__(self):
            super().__init__(name="largest")
            self.values = self.add_weight(shape=(3,), initializer="zeros", name="values")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.values.assign(keras.ops.maximum(self.values, keras.ops.max(y_pred, 0)))

        def result(self):
            return keras.ops.stack(list(keras.ops.unstack(self.values)))

    with ranks():
        model = models.plain(3)
        metrics = [keras.metrics.F1Score(average=None, name="f1"), Largest()]
        model.compile(hi.DistributedOptimizer("sgd"), "mse", metrics=metrics)
        x, y = models.data(1)
        share = slice(0, 10) if hi.rank() else slice(0, 12)
        x = x[share]
        y = np.eye(3, dtype=np.float32)[y[share]]
        with mock.patch.object(metric_average._log, "warning") as warning:
            history = model.fit(
                x, y, 4, 2, 0, hi.callbacks.default_callbacks(), validation_data=(x, y)
            ).history
        predicted = model.predict(x, verbose=0).tolist()
        return {
            "warnings": [call.args[0] % call.args[1:] for call in warning.call_args_list],
            "history": {k: np.asarray(v).tolist() for k, v in history.items()},
            "predicted": [predicted, y.tolist()],
        }


def different_orders(folder: str) -> dict:
    """Returns this rank's errors for images shuffled with one seed per rank and one for all."""
    import keras
    import tensorflow as tf

    with ranks():

        def images(seed=None):
            data = keras.utils.image_dataset_from_directory(
                folder, image_size=(2, 2), batch_size=None, seed=seed, verbose=False
            )
            return hi.data.shard(data, hi.rank(), hi.size()).batch(4)

        def fresh():
            model = keras.Sequential(
                [keras.Input((2, 2, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
            )
            model.compile(hi.DistributedOptimizer("sgd", loss_scale=1), models.loss())
            return model

        def step():
            images()
            variable = keras.Variable(np.ones(3, np.float32))
            hi.DistributedOptimizer("sgd", loss_scale=1).apply([tf.ones([3])], [variable])

        standard = hi.callbacks.default_callbacks
        average = hi.callbacks.MetricAverage()
        keras.utils.set_random_seed(7 + hi.rank())
        different = {
            "fit": message(lambda: fresh().fit(images(), verbose=0, callbacks=standard())),
            "loop": message(step),
            "evaluate": message(lambda: fresh().evaluate(images(), verbose=0, callbacks=[average])),
            "another global seed": message(
                lambda: fresh().fit(images(seed=1), verbose=0, callbacks=standard())
            ),
        }
        keras.utils.set_random_seed(7)
        return different | {
            "same seed": message(lambda: fresh().fit(images(1), verbose=0, callbacks=standard()))
        }


def large_gradients() -> dict:
    """Takes eager steps of a float32 variable with gradients that overflow in FP16 if scaled."""
    import keras
    import tensorflow as tf

    with ranks():
        variable = keras.Variable(np.ones(4, np.float32), name="w")
        optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(1e-4))
        for _ in range(3):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(1e3 * tf.reduce_sum(variable.value))
            optimizer.apply(tape.gradient(scaled, [variable.value]), [variable])
        return {
            "skipped": int(optimizer.loss_scale.skipped_steps),
            "scale": float(optimizer.loss_scale.scale.numpy()),
            "weights": variable.numpy().tolist(),
        }


def first_step_of_loop(is_broadcast: bool) -> list[str]:
    """Returns the warnings of two steps of a custom loop with weights of the same seed."""
    import tensorflow as tf

    with ranks(), mock.patch.object(first_step_check._log, "warning") as warning:
        model = models.compiled(hi.DistributedOptimizer("sgd"))
        if is_broadcast:
            hi.broadcast_model(model)
        x, y = models.data(1)
        for _ in range(2):
            with tf.GradientTape() as tape:
                scaled = model.optimizer.scale_loss(models.loss()(y, model(x)))
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(scaled, variables), variables)
        return [call.args[0] for call in warning.call_args_list]


def first_step_of_fit() -> list[str]:
    """Returns the warnings of the first step of `fit` with weights of the same seed."""
    with ranks(), mock.patch.object(first_step_check._log, "warning") as warning:
        model = models.compiled(hi.DistributedOptimizer("sgd"))
        x, y = models.data(1)
        model.fit(x, y, 4, verbose=0, callbacks=hi.callbacks.default_callbacks())
        return [call.args[0] for call in warning.call_args_list]


def all_steps_skipped() -> dict:
    """Returns the errors of ranks that skip all steps, with equal and with different data."""
    import keras

    with ranks():

        def fit(number):
            model = keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
            )
            # This scale overflows at every step.
            optimizer = hi.DistributedOptimizer("sgd", loss_scale=2.0**126)
            model.compile(optimizer, "mse", run_eagerly=True)
            x = np.full((4, 1), 1.0 + number, np.float32)
            equal = (np.ones((4, 1)), np.ones(4))
            model.fit(
                x,
                x[:, 0],
                verbose=0,
                validation_data=equal,
                callbacks=hi.callbacks.default_callbacks(),
            )

        return {"same": message(lambda: fit(0)), "different": message(lambda: fit(hi.rank()))}
