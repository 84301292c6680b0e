"""The fused program of the stem equals TensorFlow's operations, compiled by XLA for the CPU."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.models import factory, fused_layers, stem_program
from tests.models.training_pass import training_pass

EPSILON = 1e-3


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets XLA compile programs, as on a GPU."""
    monkeypatch.setattr(xla, "has_gpu", lambda: True)
    monkeypatch.setattr(xla, "supported", lambda: True)


def operations(x, gamma, beta):
    """Applies TensorFlow's operations in the order of the layers.

    The variance has Bessel's correction.
    """
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=gamma, offset=beta, mean=[], variance=[], epsilon=EPSILON, data_format="NHWC"
    )
    padded = tf.pad(tf.nn.relu(y), [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.nn.max_pool2d(padded, 3, 2, "VALID"), mean, variance


def program(x, gamma, beta):
    return stem_program.normalize_relu_max_pool(x, gamma, beta, EPSILON)


def outputs_and_gradients(function, x, gamma, beta, dy):
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        y, mean, variance = function(x, gamma, beta)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * dy)
    return [y, *tape.gradient(loss, [x, gamma, beta]), mean, variance]


def draw(dtype=tf.float32):
    random = np.random.default_rng(0)
    x = random.normal(0.5, 2.0, (3, 8, 12, 5))
    gamma = random.uniform(0.5, 1.5, 5)
    # The last channel is never positive, so none of its pixels gets a gradient.
    beta = np.array([0.3, 0.0, -0.5, 1.0, -20.0])
    dy = random.normal(size=(3, 4, 6, 5))
    return tf.constant(x, dtype), *(tf.constant(v, tf.float32) for v in (gamma, beta, dy))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(tf.float32, 1e-5), (tf.float16, 5e-3), (tf.bfloat16, 4e-2)]
)
def test_stem_program_has_outputs_and_gradients_of_tensorflow(dtype, tolerance, on_gpu):
    x, gamma, beta, dy = draw(dtype)
    exact = tf.cast(x, tf.float32)
    expected = outputs_and_gradients(operations, exact, gamma, beta, dy)
    actual = outputs_and_gradients(program, x, gamma, beta, dy)
    count = 3 * 8 * 12
    expected[-1] *= (count - 1) / count
    assert actual[0].dtype == actual[1].dtype == dtype
    for value, expected_value in zip(actual, expected, strict=True):
        value = tf.cast(value, tf.float32)
        np.testing.assert_allclose(
            value, expected_value, atol=tolerance * np.abs(expected_value).max(), rtol=0
        )
    assert not np.any(tf.cast(actual[1], tf.float32)[..., -1])


def test_stem_program_gives_the_gradient_of_equal_pixels_to_the_first(on_gpu):
    x = tf.ones([1, 4, 4, 1])
    arguments = (x, tf.ones([1]), tf.ones([1]), tf.ones([1, 2, 2, 1]))
    with tf.GradientTape() as tape:
        tape.watch(x)
        pooled = stem_program._max_pool(x)
    assert pooled[1].numpy()[0, ..., 0].tolist() == [[4, 3], [1, 0]]
    expected = outputs_and_gradients(operations, *arguments)
    actual = outputs_and_gradients(program, *arguments)
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-6)
    np.testing.assert_allclose(actual[2:4], expected[2:4], atol=1e-5)


def create(jit_stem=False, **settings):
    settings = {"width": 8, "seed": 3, "batch_norm": "moving", **settings}
    return factory.create(
        "resnet8", 5, settings.pop("image_size", 32), jit_stem=jit_stem, **settings
    )


def test_network_with_stem_program_has_the_variables_and_results_of_the_layers(on_gpu):
    plain = create()
    fused = create(True)
    assert isinstance(fused.get_layer("stem_bn"), fused_layers.StemNormalization)
    assert [v.path for v in fused.variables] == [v.path for v in plain.variables]
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(4, 32, 32, 3)), tf.float32)
    labels = tf.constant(random.integers(0, 5, 4))
    for model in (plain, fused):
        model.get_layer("stem_bn").beta.assign(np.full(8, 0.1))
    actual = training_pass(fused, images, labels)
    expected = training_pass(plain, images, labels)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-3, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(
        fused(images, training=False), plain(images, training=False), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"blurpool": True},
        {"virtual_gpus": 2},
        {"sync_allreduce": lambda t, name: t},
        {"stem": "3x3"},
    ],
)
def test_network_that_the_stem_program_does_not_fit_keeps_its_layers(settings):
    names = {layer.name for layer in create(True, **settings).layers}
    assert "stem_relu" in names


@pytest.mark.parametrize(
    ("side", "trainable", "gpu"), [(9, True, True), (8, False, True), (8, True, False)]
)
def test_stem_layer_without_program_computes_its_layers(side, trainable, gpu, monkeypatch):
    monkeypatch.setattr(xla, "has_gpu", lambda: gpu)
    monkeypatch.setattr(xla, "supported", lambda: True)
    monkeypatch.setattr(
        fused_layers, "normalize_relu_max_pool", lambda *_: pytest.fail("the program ran")
    )
    monkeypatch.setattr(fused_layers.kernels, "has_gpu", lambda: False)
    images = tf.constant(np.random.default_rng(0).normal(size=(2, side, side, 4)), tf.float32)
    layer = fused_layers.StemNormalization(trainable=trainable)
    assert layer(images, training=True).shape == layer.compute_output_shape(images.shape)
