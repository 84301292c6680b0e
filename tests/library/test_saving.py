"""What is saved loads again, on one rank or several, and training goes on as if it had not stopped."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet import files, optimizers
from hybrid_imagenet.errors import UserError
from tests.library import saving


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["hybrid", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_saved_model_continues_where_it_stopped(pools, tmp_path, name):
    results = pools[2].call(saving.loaded, str(tmp_path), name)
    for result in results:
        for continued in result["continued"]:
            close(continued, results[0]["whole"])
    for file, weights, state in results[0]["files"]:
        model = hi.load_model(file)
        close(saving.weights(model), weights)
        close(saving.state(model), state)


def test_models_with_each_optimizer_load_in_a_process_that_has_imported_nothing_else(tmp_path):
    wanted = {}
    for name in optimizers.NAMES:
        model = saving.fit(saving.made(hi.DistributedOptimizer(optimizers.create(name))), 1)
        model.save(tmp_path / f"{name}.keras")
        wanted[name] = [saving.weights(model), saving.state(model)]
    code = (
        "import sys, json, pathlib, keras, hybrid_imagenet.library\n"
        "values = lambda variables: [v.numpy().astype(float).ravel().tolist() for v in variables]\n"
        f"models = {{p.stem: keras.models.load_model(p) for p in pathlib.Path({str(tmp_path)!r}).iterdir()}}\n"
        "assert 'horovod' not in sys.modules\n"
        "print(json.dumps({n: [values(m.weights), values(m.optimizer.variables)] for n, m in models.items()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        for kind, values in zip(found, wanted.pop(name), strict=True):
            close(kind, values)
    assert not wanted


@pytest.mark.parametrize("kind", ["keras", "own"])
def test_an_interrupted_run_ends_as_one_that_was_not(pools, tmp_path, kind):
    for result in pools[2].call(saving.interrupted, str(tmp_path), kind):
        assert result["begun"] == [0, 1, 2, 2, 3]
        close(result["again"], result["whole"])
    if kind == "keras":
        assert len(hi.load_model(tmp_path / "best.keras").optimizer.variables) > 5


def test_weights_are_loaded_before_an_accumulating_optimizer_is_built(tmp_path, caplog):
    model, other = (
        saving.made(hi.DistributedOptimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)))
        for _ in range(2)
    )
    saving.fit(model, 1)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert "its state is not loaded, since it is not built; the weights are" in caplog.text
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])


def test_a_folder_of_checkpoints_is_for_one_run_at_a_time(tmp_path):
    def fit():
        saving.fit(saving.made(hi.DistributedOptimizer("sgd")), 1, more=[hi.callbacks.Checkpoint(tmp_path / "held")])

    fit()
    other = files.lock(tmp_path / "held")
    with pytest.raises(UserError, match="in use by another run"):
        fit()
    other.close()
    fit()
    with pytest.raises(UserError, match=r"keeps other values, .*, or give another folder"):
        saving.fit(saving.made(hi.DistributedOptimizer("adam")), 2, more=[hi.callbacks.Checkpoint(tmp_path / "held")])
