"""What is saved loads again, on one rank or several, and training goes on as if it had not stopped."""

import json
import subprocess
import sys

import numpy as np
import pytest

import hybrid_imagenet as hi
from tests.library import saving


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["hybrid", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_saved_model_goes_on_where_it_stopped_in_a_process_without_horovod_too(pools, tmp_path, name):
    results = pools[2].call(saving.loaded, str(tmp_path), name)
    for result in results:
        for continued in result["continued"]:
            close(continued, results[0]["whole"])
    for file, weights, state in results[0]["files"]:
        model = hi.load_model(file)
        close(saving.weights(model), weights)
        close(saving.state(model), state)
    if name == "hybrid":
        code = (
            "import sys, json, keras, hybrid_imagenet.library\n"
            f"model = keras.models.load_model({file!r})\n"
            "assert 'horovod' not in sys.modules\n"
            "print(json.dumps([w.astype(float).ravel().tolist() for w in model.get_weights()]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        close(json.loads(done.stdout.splitlines()[-1]), weights)


def test_weights_alone_load_into_another_model(tmp_path):
    model = saving.made(saving.hybrid())
    saving.fit(model, 1)
    model.save_weights(tmp_path / "only.weights.h5")
    other = saving.models.plain(9)
    other.load_weights(tmp_path / "only.weights.h5")
    close(saving.weights(other), saving.weights(model))


@pytest.mark.parametrize("kind", ["keras", "own"])
def test_an_interrupted_run_ends_as_one_that_was_not(pools, tmp_path, kind):
    for result in pools[2].call(saving.interrupted, str(tmp_path), kind):
        assert result["begun"] == [0, 1, 2, 2, 3]
        close(result["again"], result["whole"])
    if kind == "keras":
        assert len(hi.load_model(tmp_path / "best.keras").optimizer.variables) > 5
