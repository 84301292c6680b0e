"""BlurPool, and networks that blur before they subsample."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.models import factory
from hybrid_imagenet.models.layers import BlurPool
from tests.references.short_reference import blurred


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(2, 6, 6, 3), (1, 7, 5, 2), (1, 1, 1, 4)])
def test_blur_pool_is_the_sampled_binomial_filter(shape, stride):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    layer = BlurPool(stride)
    out = layer(tf.constant(x))
    np.testing.assert_allclose(out, blurred(x, stride), rtol=1e-5, atol=1e-6)
    assert layer.compute_output_shape((None, *shape[1:]))[1:] == out.shape[1:]
    np.testing.assert_allclose(layer(tf.ones(shape)), np.ones(out.shape), rtol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_blur_pool_gradient_uses_the_same_filter(policy):
    layer = BlurPool(2, dtype=policy)
    x = tf.zeros([1, 6, 6, 1], policy.removeprefix("mixed_"))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(layer(x)[:, 1, 1, :])
    expected = np.zeros((6, 6))
    expected[1:4, 1:4] = np.outer([1, 2, 1], [1, 2, 1]) / 16
    np.testing.assert_allclose(
        tf.cast(tape.gradient(y, x), tf.float32)[0, :, :, 0], expected, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "stem", "blurs"),
    [
        ("resnet50", "imagenet", 1 + 2 * 3),
        ("resnet18", "3x3", 2 * 3),
        ("resnet8", "3x3_stride2", 2 * 2),
    ],
)
def test_network_with_blurpool_blurs_before_every_stride_but_the_first(name, stem, blurs):
    options = {"width": 4, "stem": stem, "seed": 3}
    plain = factory.create(name, 5, 32, **options)
    network = factory.create(name, 5, 32, blurpool=True, **options)
    layers = list(network._flatten_layers())
    assert sum(isinstance(layer, BlurPool) for layer in layers) == blurs
    for layer in layers:
        if getattr(layer, "strides", (1, 1)) == (2, 2):
            before = layer.input
            assert layer.name == "stem_conv" or "blur" in before._keras_history.operation.name
    # The variables and their initial values are the same, so a trained network can get blurs.
    assert [v.path.split("/", 1)[-1] for v in network.weights] == [
        v.path.split("/", 1)[-1] for v in plain.weights
    ]
    for one, other in zip(network.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert network(np.zeros((1, 32, 32, 3), np.float32)).shape == (1, 5)


def test_initial_bias_is_the_bias_of_the_classifier():
    network = factory.create("resnet8", 5, 16, width=4, initial_bias=-1.5)
    np.testing.assert_array_equal(
        network.get_layer("logits").bias.numpy(), np.full(5, -1.5, np.float32)
    )
