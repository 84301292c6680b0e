"""Arrays of layers that are not weights and differ between ranks are named."""

from unittest import mock

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import layer_constants


class Masked(keras.layers.Layer):
    """Keeps a part of the features, as a decision forest does."""

    def __init__(self, kind, name="masked"):
        super().__init__(name=name)
        mask = np.random.permutation(64) < 32
        self.kind = kind
        if kind == "tensor":
            self.mask = keras.ops.convert_to_tensor(mask, dtype="float32")
        elif kind == "list":
            self.masks = [mask, 1]
        else:
            self.mask = self.add_weight(shape=(64,), trainable=False)
            self.mask.assign(mask)

    def call(self, x):
        return x * (self.masks[0] if self.kind == "list" else self.mask)


def build(seed, kind):
    keras.utils.set_random_seed(seed)
    inner = keras.Sequential([keras.Input((64,)), Masked(kind)], name="inner")
    return keras.Sequential([keras.Input((64,)), inner, keras.layers.Dense(1)])


def warnings(model, other_model):
    """Returns what rank 0 logs when it broadcasts a model, and rank 1 has another one."""

    def allgather(value):
        is_digests = isinstance(value, dict)
        return [value, layer_constants._digests(other_model) if is_digests else value]

    two = mock.Mock(size=2, rank=0, broadcast_object=lambda v: v, allgather_object=allgather)
    with mock.patch.object(layer_constants._log, "warning") as warning:
        hi.broadcast_model(model, two)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


@pytest.mark.parametrize(
    ("kind", "name"), [("tensor", "inner/masked.mask"), ("list", "inner/masked.masks_0")]
)
def test_broadcast_model_of_layers_with_different_constants_names_them(kind, name):
    (line,) = warnings(build(1, kind), build(2, kind))
    assert f"differ between ranks ({name})" in line
    assert "Call keras.utils.set_random_seed with the same number on every rank" in line


def test_broadcast_model_after_the_same_seed_or_with_weights_logs_nothing():
    assert warnings(build(1, "tensor"), build(1, "tensor")) == []
    assert warnings(build(1, "weight"), build(2, "weight")) == []


def test_broadcast_model_of_layers_with_different_vocabularies_names_them():
    def with_lookup(words):
        lookup = keras.layers.StringLookup(name="lookup")
        lookup.adapt(words)
        return keras.Sequential(
            [keras.Input((1,), dtype="string"), lookup, keras.layers.Embedding(4, 2)],
            name="model",
        )

    (line,) = warnings(with_lookup(["a", "b"]), with_lookup(["b", "c"]))
    assert "differ between ranks (model/lookup.vocabulary)" in line
    assert "adapt layers to the same data" in line
    assert warnings(with_lookup(["a", "b"]), with_lookup(["a", "b"])) == []


def test_broadcast_model_of_normalization_that_ranks_have_adapted_differently_names_it():
    def adapted(mean):
        layer = keras.layers.Normalization(name="scale")
        layer.adapt(np.random.default_rng(0).normal(mean, size=(8, 3)))
        return keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)], name="model")

    (line,) = warnings(adapted(0), adapted(1))
    assert "scale.mean" in line
    assert "with Normalization, all train with what rank 0 has adapted to" in line
    assert warnings(adapted(0), adapted(0)) == []
    # Only rank 0 has loaded weights; the broadcast sends them.
    model = adapted(0)
    model.layers[0].adapt_mean.assign([0.0, 0.0, 0.0])
    model.layers[0].adapt_variance.assign([1.0, 1.0, 1.0])
    model.layers[0].finalize_state()
    assert warnings(adapted(0), model) == []


def test_digests_contain_no_losses_of_a_step():
    model = keras.Sequential([keras.Input((3,)), keras.layers.ActivityRegularization(0.1)])
    model(np.ones((2, 3), np.float32))
    assert model.losses
    assert layer_constants._digests(model) == {}
