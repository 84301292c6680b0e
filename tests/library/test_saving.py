"""Saved models and interrupted runs continue, on one rank or several, like undisturbed runs."""

import json
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet import files, optimizers
from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import ExactBatchSampler, keras_dataset
from tests.library import models, saving


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid", "adamw"])
def test_saved_model_continues_where_it_stopped(pools, tmp_path, name):
    results = pools[2].call(saving.loaded, str(tmp_path), name)
    for result in results:
        for continued in result["continued"]:
            assert_close(continued, results[0]["whole"])
    for file, weights, state in results[0]["files"]:
        model = hi.load_model(file)
        assert_close(saving.weights(model), weights)
        assert_close(saving.state(model), state)


@pytest.mark.slow
def test_saved_model_with_each_optimizer_loads_in_a_new_process(tmp_path):
    expected = {}
    for name in optimizers.NAMES:
        optimizer = hi.DistributedOptimizer(optimizers.create(name))
        model = saving.fit(saving.compiled(optimizer, run_eagerly=True), 1)
        model.save(tmp_path / f"{name}.keras")
        expected[name] = [saving.weights(model), saving.state(model)]
    code = (
        "import sys, json, pathlib, keras, hybrid_imagenet.checkpoints.keras_file\n"
        "values = lambda variables: [v.numpy().astype(float).ravel().tolist() for v in variables]\n"
        f"models = {{p.stem: keras.models.load_model(p) for p in"
        f" pathlib.Path({str(tmp_path)!r}).iterdir()}}\n"
        "assert 'horovod' not in sys.modules\nprint(json.dumps({n: [values(m.weights),"
        " values(m.optimizer.variables)] for n, m in models.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, loaded in json.loads(done.stdout.splitlines()[-1]).items():
        for kind, values in zip(loaded, expected.pop(name), strict=True):
            assert_close(kind, values)
    assert not expected


@pytest.mark.parametrize("kind", [pytest.param("keras", marks=pytest.mark.slow), "own"])
def test_interrupted_run_ends_like_an_undisturbed_one(pools, tmp_path, kind):
    for result in pools[2].call(saving.interrupted, str(tmp_path), kind):
        assert result["begun"] == [0, 1, 2, 2, 3]
        assert_close(result["again"], result["whole"])
    if kind == "keras":
        assert len(hi.load_model(tmp_path / "best.keras").optimizer.variables) > 5


def test_load_weights_before_an_accumulating_optimizer_is_built_loads_the_weights(tmp_path, caplog):
    model, other = (
        saving.compiled(
            hi.DistributedOptimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
        )
        for _ in range(2)
    )
    saving.fit(model, 1)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert "its state is not loaded, since it is not built; the weights are" in caplog.text
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])


def rewrite_model(file, change):
    """Changes the description of the optimizer in a `.keras` file."""
    with zipfile.ZipFile(file) as model_file:
        members = {name: model_file.read(name) for name in model_file.namelist()}
    description = json.loads(members["config.json"])
    change(description["compile_config"]["optimizer"]["config"])
    with zipfile.ZipFile(file, "w") as model_file:
        for name, content in (members | {"config.json": json.dumps(description)}).items():
            model_file.writestr(name, content)


def test_load_model_with_an_optimizer_of_an_earlier_version_says_to_load_it_without(tmp_path):
    file = tmp_path / "model.keras"
    model = saving.fit(saving.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True), 1)
    model.save(file)
    rewrite_model(file, lambda optimizer: optimizer.pop("format"))
    with pytest.raises(UserError, match=r"earlier version .* load_model\(PATH, compile=False\)"):
        hi.load_model(file)
    loaded = hi.load_model(file, compile=False)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_weights_of_a_checkpoint_can_be_loaded_with_numpy_as_docs_resume_shows(tmp_path):
    def compiled(seed):
        model = keras.Sequential([keras.Input((6,)), *models.plain(seed).layers])
        model.add(keras.layers.BatchNormalization())
        model.compile(hi.DistributedOptimizer("sgd"), models.loss(), run_eagerly=True)
        return model

    model = saving.fit(compiled(3), 1, more=[hi.callbacks.Checkpoint(tmp_path / "checkpoints")])
    (file,) = (tmp_path / "checkpoints").glob("step-*.npz")
    other = compiled(4)
    with np.load(file) as checkpoint:
        names = sorted(name for name in checkpoint.files if name.startswith("array/model/"))
        other.set_weights([checkpoint[name] for name in names])
    assert saving.weights(other) == saving.weights(model)


def test_load_weights_with_an_optimizer_of_an_earlier_version_loads_the_weights(tmp_path, caplog):
    file = tmp_path / "model.weights.h5"
    model, other = (
        saving.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True) for _ in range(2)
    )
    saving.fit(model, 1)
    model.save_weights(file)
    with h5py.File(file, "r+") as content:
        del content["optimizer/vars/format"]
    other.optimizer.build(other.trainable_variables)
    other.load_weights(file)
    assert "has no state of a DistributedOptimizer of this version" in caplog.text
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])


def test_exact_order_and_schedule_continue_after_and_inside_an_epoch(tmp_path):
    images = np.random.default_rng(0).normal(size=(22, 4)).astype(np.float32)
    rates = {}

    def train(epochs, folder, state=None):
        keras.utils.set_random_seed(1)
        # The three passes have 6, 5 and 6 batches.
        sampler = ExactBatchSampler(22, 4, seed=1)
        if state:
            sampler.load_state_dict(state)
        batches = keras_dataset(sampler, lambda examples: (images[examples], images[examples]))
        optimizer = hi.DistributedOptimizer("sgd", schedule=hi.schedules.cosine(peak=0.5, epochs=3))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile(optimizer, "mse")
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: rates.setdefault(sampler.position, []).append(
                float(optimizer.learning_rate)
            )
        )
        more = [batches.counter, hi.callbacks.Checkpoint(tmp_path / folder, order=sampler), note]
        callbacks = [*hi.callbacks.default_callbacks(), *more]
        model.fit(
            batches,
            initial_epoch=sampler.epoch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return model.get_weights()

    whole = train(3, "whole")
    train(2, "again")
    for resumed, expected in zip(train(3, "again"), whole, strict=True):
        np.testing.assert_array_equal(resumed, expected)
    train(3, "inside", {"epoch": 1, "offset": 14})
    assert max(map(len, rates.values())) == 3
    assert all(len(set(values)) == 1 for values in rates.values())
    with pytest.raises(
        UserError, match=r"fit begins epoch 0, but the order is in epoch 1\. Load the run's state"
    ):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        sampler = ExactBatchSampler(22, 4, seed=1)
        sampler.load_state_dict({"epoch": 1, "offset": 0})
        batches = keras_dataset(sampler, lambda examples: (images[examples], images[examples]))
        model.fit(batches, shuffle=False, verbose=0, callbacks=[batches.counter])


def test_exact_order_stopped_twice_within_an_epoch_saves_its_position(tmp_path):
    images = np.random.default_rng(0).normal(size=(22, 4)).astype(np.float32)

    class StopAfterTwoBatches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    positions = []
    for _ in range(2):
        sampler = ExactBatchSampler(22, 4, seed=1)
        batches = keras_dataset(sampler, lambda examples: (images[examples], images[examples]))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile(hi.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
        checkpoint = hi.callbacks.Checkpoint(tmp_path / "checkpoints", order=sampler)
        more = [batches.counter, checkpoint, StopAfterTwoBatches()]
        callbacks = [*hi.callbacks.default_callbacks(), *more]
        model.fit(batches, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        latest = max((tmp_path / "checkpoints").glob("step-*.npz"))
        positions.append(archive.read_meta(latest)["state"]["recorded_at"])
    assert positions == [8 / 22, 16 / 22]


def test_checkpoint_folder_in_use_by_another_run_is_rejected(tmp_path):
    def fit():
        saving.fit(
            saving.compiled(hi.DistributedOptimizer("sgd")),
            1,
            more=[hi.callbacks.Checkpoint(tmp_path / "held")],
        )

    fit()
    other = files.lock(tmp_path / "held")
    with pytest.raises(UserError, match="in use by another run"):
        fit()
    other.close()
    fit()
    with pytest.raises(UserError, match=r"has other variables, .*, or pass another directory"):
        saving.fit(
            saving.compiled(hi.DistributedOptimizer("adam")),
            2,
            more=[hi.callbacks.Checkpoint(tmp_path / "held")],
        )


def plateau_run(folder, first_epochs, epochs=7):
    """Trains with callbacks that count epochs, interrupted after some epochs.

    Returns the logs of the last part, the epoch in which EarlyStopping stopped, and the weights.
    """
    logs = []

    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs_=None):
            logs.append((epoch, logs_["loss"], float(self.model.optimizer.learning_rate)))

    for last in [*first_epochs, epochs]:
        logs.clear()
        model = saving.compiled(
            hi.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True
        )
        # No improvement is large enough, so both callbacks act.
        stopping = keras.callbacks.EarlyStopping(
            "loss", min_delta=10.0, patience=5, start_from_epoch=1, restore_best_weights=True
        )
        callbacks = [
            hi.callbacks.Checkpoint(folder),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=10.0),
            stopping,
            Log(),
        ]
        saving.fit(model, last, more=callbacks)
    return logs, stopping.stopped_epoch, [w.tolist() for w in model.get_weights()]


def test_keras_callbacks_that_count_epochs_continue_after_a_resume(tmp_path):
    first_epochs = (1, 3, 4)
    whole_logs, whole_stop, whole_weights = plateau_run(tmp_path / "whole", ())
    logs, stop, weights = plateau_run(tmp_path / "interrupted", first_epochs)
    assert len({rate for _, _, rate in whole_logs}) > 1, "ReduceLROnPlateau did not act"
    assert logs == whole_logs[first_epochs[-1] :]
    assert (stop, weights) == (whole_stop, whole_weights)


def test_callback_with_state_dict_continues_after_a_resume(tmp_path):
    class Counter(keras.callbacks.Callback):
        epochs = 0

        def state_dict(self):
            return {"epochs": self.epochs}

        def load_state_dict(self, state):
            self.epochs = state["epochs"]

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1

    for epochs in (1, 3):
        counter = Counter()
        callbacks = [hi.callbacks.Checkpoint(tmp_path / "checkpoints"), counter]
        saving.fit(
            saving.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True),
            epochs,
            more=callbacks,
        )
        assert counter.epochs == epochs


def test_resumed_run_names_callbacks_that_do_not_continue(tmp_path, capsys):
    def fit(*more, append=True):
        callbacks = [
            hi.callbacks.Checkpoint(tmp_path / "checkpoints"),
            *more,
            keras.callbacks.CSVLogger(tmp_path / "log.csv", append=append),
        ]
        saving.fit(
            saving.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True), 1, more=callbacks
        )
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]

    assert fit() == []
    assert fit() == []
    plateau, log = fit(keras.callbacks.ReduceLROnPlateau("loss"), append=False)
    assert "ReduceLROnPlateau starts from zero in this resumed run, because" in plateau
    assert "log.csv. Pass append=True." in log


def test_fit_after_an_interrupted_resume_begins_at_its_own_epoch(tmp_path):
    def interrupt(epoch, logs=None):
        raise KeyboardInterrupt

    model = saving.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True)
    checkpoint = hi.callbacks.Checkpoint(tmp_path / "checkpoints")
    saving.fit(model, 2, more=[checkpoint])
    with pytest.raises(KeyboardInterrupt):
        stop = keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
        saving.fit(model, 4, more=[checkpoint, stop])
    epochs = []
    saving.fit(
        model,
        1,
        more=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: epochs.append(epoch))],
    )
    assert epochs == [0]


def test_dropout_continues_with_the_same_random_numbers_after_a_resume(tmp_path):
    def fit(folder, epochs):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        optimizer = hi.DistributedOptimizer("sgd")
        model.compile(optimizer, models.loss(), run_eagerly=True)
        saving.fit(model, epochs, more=[hi.callbacks.Checkpoint(folder)])
        return model.get_weights()

    whole = fit(tmp_path / "whole", 2)
    first = fit(tmp_path / "parts", 1)
    resumed = fit(tmp_path / "parts", 2)
    assert not np.array_equal(first[0], resumed[0])
    for ours, expected in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(ours, expected)
