"""The callbacks of the training program work in `model.fit`."""

import json

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.optimizers import compiled_model
from tests.library import models


def make_directory(directory):
    directory.mkdir()
    return directory


def fit(tmp_path, epochs, *more):
    """Trains with averaged weights, after resuming from the directory if it has a checkpoint."""
    average = hi.optimizers.WeightAverage(0.5)
    optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1), average=average)
    model = models.compiled(optimizer, metrics=["accuracy"], run_eagerly=True)
    x, y = models.data(1)
    callbacks = [
        *hi.callbacks.default_callbacks(),
        hi.callbacks.SwapAveragedWeights(average),
        hi.callbacks.DivergenceGuard(),
        *more,
        hi.callbacks.MetricsLog(tmp_path / "metrics.jsonl"),
        hi.callbacks.Checkpoint(tmp_path / "checkpoints"),
    ]
    history = model.fit(
        x, y, models.BATCH, epochs, 0, callbacks, shuffle=False, validation_data=(x, y)
    )
    return model, average, history.history


def test_swap_averaged_weights_in_fit_validates_and_resumes_averages(tmp_path):
    model, average, history = fit(make_directory(tmp_path / "whole"), 2)
    x, y = models.data(1)
    trained = model.get_weights()
    assert history["val_loss"][-1] != model.evaluate(x, y, verbose=0)[0]
    model.set_weights([value.numpy() for value in average.variables])
    np.testing.assert_allclose(
        history["val_loss"][-1], model.evaluate(x, y, models.BATCH, verbose=0)[0], rtol=1e-5
    )
    fit(make_directory(tmp_path / "parts"), 1)
    resumed, resumed_average, resumed_history = fit(tmp_path / "parts", 2)
    assert resumed_history["val_loss"] == history["val_loss"][1:]
    for ours, expected in zip(resumed.get_weights(), trained, strict=True):
        np.testing.assert_array_equal(ours, expected)
    pairs = zip(resumed_average.variables, average.variables, strict=True)
    for ours, expected in pairs:
        np.testing.assert_array_equal(ours.numpy(), expected.numpy())
    records = [
        json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["epoch"] for record in records] == [1, 2]
    # The second session continues to count.
    assert [record["step"] for record in records] == [models.STEPS, 2 * models.STEPS]
    assert [record["val_loss"] for record in records] == history["val_loss"]


def test_stop_at_target_and_profiler_work_in_fit(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    profiler = hi.callbacks.Profiler(2, 3, tmp_path / "profile")
    _, _, history = fit(
        tmp_path / "run", 5, hi.callbacks.StopAtTarget(0.0, monitor="val_accuracy"), profiler
    )
    assert len(history["loss"]) == 1
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert "profile of steps 2 to 3: tensorboard" in capsys.readouterr().err
    assert isinstance(profiler, keras.callbacks.Callback)


def test_batch_normalization_with_momentum_0_keeps_the_statistics_of_the_last_batch():
    layer = keras.layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
    model.compile(hi.DistributedOptimizer("sgd"), models.loss())
    x, y = models.data(1)
    callbacks = hi.callbacks.default_callbacks()
    model.fit(x, y, models.BATCH, 2, 0, callbacks, shuffle=False)
    last = x[-models.BATCH :]
    np.testing.assert_allclose(layer.moving_mean.numpy(), last.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), last.var(axis=0), rtol=1e-5)


def test_value_of_a_step_without_a_distributed_optimizer_is_an_error():
    class Read(hi.callbacks.TrainingCallback):
        def on_train_batch_end(self, batch, logs=None):
            self.run.read("grad_norm")

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", models.loss(), run_eagerly=True)
    x, y = models.data(1)
    with pytest.raises(hi.UserError, match=r"grad_norm of a step needs .*DistributedOptimizer"):
        model.fit(x, y, models.BATCH, verbose=0, callbacks=[Read()])


def test_updates_applied_of_two_optimizers_is_the_larger_count():
    model = models.plain(1)
    assert compiled_model.updates_applied(model) == 0
    # A GAN has two optimizers like these, which `compile` does not know.
    model.first = hi.DistributedOptimizer(hi.optimizers.SGD(0.1), loss_scale=1)
    model.second = hi.DistributedOptimizer(hi.optimizers.SGD(0.1), loss_scale=1)
    weights = model.trainable_variables
    for optimizer, count in ((model.first, 1), (model.second, 3)):
        for _ in range(count):
            optimizer.apply([np.ones(w.shape, np.float32) for w in weights], weights)
    assert compiled_model.updates_applied(model) == 3
