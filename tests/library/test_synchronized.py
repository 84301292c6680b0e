"""Layers with `synchronized=True` equal Keras's layers in one process with all ranks' batches."""

from unittest import mock

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import synchronized_batch_norm
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import UserError
from tests.library import synchronized


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_synchronized_layers_equal_one_process_with_the_batches_of_all_ranks(pools, size):
    rows = pools[size].call(synchronized.on_rank)
    for name in synchronized.LAYERS:
        expected = synchronized.normalized(name, 0, synchronized.BATCH, connect=False)
        tolerance = 0.03 if name == "bfloat16" else 2e-6
        results = [row[name] for row in rows]
        joined = {
            "outputs": np.concatenate([row["outputs"] for row in results]),
            "dx": np.concatenate([row["dx"] for row in results]),
            # Each rank has the gradient of its own loss; the optimizer sums them.
            "gradients": np.sum([row["gradients"] for row in results], axis=0),
            "statistics": np.asarray(results[0]["statistics"]),
        }
        for key, value in joined.items():
            scale = max(1.0, np.max(np.abs(expected[key]), initial=0))
            np.testing.assert_allclose(
                value, expected[key], rtol=0, atol=tolerance * scale, err_msg=f"{name}: {key}"
            )
        assert all(row["statistics"] == results[0]["statistics"] for row in results), name


def test_synchronized_layers_in_unsupported_uses_are_rejected(pools):
    first, second = pools[2].call(synchronized.rejected)
    assert first["fit"] == second["fit"]
    assert "bn: synchronized=True sums over ranks inside the step" in first["fit"]
    assert "compile(..., jit_compile=False)" in first["fit"]
    assert "bn: synchronized=True sums over ranks, and XLA cannot compile that" in first["loop"]
    assert "bn: synchronized=True: renorm=True is not supported. Omit it." in first["renorm"]
    assert "Own has its own call. Use keras.layers.BatchNormalization." in first["subclass"]
    assert first["converted, on a GPU"] == "False"


def test_fit_after_one_without_synchronization_traces_its_step_again(pools):
    alone, together = zip(*pools[2].call(synchronized.retraced), strict=True)
    assert list(alone) == [[0.0] * 3, [1.0] * 3]
    assert list(together) == [[0.5] * 3] * 2


def test_synchronize_batch_norm_reaches_nested_layers_and_saves_layers_of_keras(tmp_path):
    inner = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.BatchNormalization()])
    before = model.get_weights()
    assert hi.synchronize_batch_norm(model) is model
    with mock.patch.object(process, "size", lambda: 2):
        synchronized_batch_norm.connect(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    layers = [loaded.layers[0].layers[0], loaded.layers[1]]
    assert [type(layer) for layer in layers] == [keras.layers.BatchNormalization] * 2
    assert all(layer.synchronized for layer in layers)
    for value, other in zip(loaded.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, other)
    x = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(loaded(x, training=True), model(x, training=True))


def test_synchronize_batch_norm_before_init_among_ranks_is_rejected(monkeypatch):
    process.shutdown()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    with pytest.raises(UserError, match="init"):
        hi.synchronize_batch_norm(model)
    assert not model.layers[0].synchronized
