"""Networks with fused XLA programs equal the same networks of separate layers."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.models import (
    factory,
    fused_layers,
    normalization_program,
    shortcut_program,
)
from hybrid_imagenet.models.depths import PROGRAMS
from tests.models.training_pass import training_pass

EPSILON = 1e-3


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets XLA compile programs, as on a GPU."""
    monkeypatch.setattr(xla, "has_gpu", lambda: True)
    monkeypatch.setattr(xla, "supported", lambda: True)


def draw(shape, seed):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), tf.float32)


def operations(x, gamma, beta, *shortcut):
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x, scale=gamma, offset=beta, mean=[], variance=[], epsilon=EPSILON, data_format="NHWC"
    )
    return tf.nn.relu(tf.add_n([y, *shortcut])), mean, variance


def program(x, gamma, beta, *shortcut):
    added = shortcut[0] if shortcut else None
    return normalization_program.normalize_relu(x, added, gamma, beta, EPSILON)


def outputs_and_gradients(function, inputs, dy):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y, *rest = function(*inputs)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * dy)
    return [y, *tape.gradient(loss, inputs), *rest]


@pytest.mark.parametrize("shortcuts", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(tf.float32, 1e-5), (tf.float16, 5e-3), (tf.bfloat16, 4e-2)]
)
def test_normalize_relu_has_outputs_and_gradients_of_tensorflow(
    dtype, tolerance, shortcuts, on_gpu
):
    shape = (3, 4, 6, 5)
    x = tf.cast(2.0 * draw(shape, 0) + 0.5, dtype)
    added = [tf.cast(draw(shape, 1), dtype)] * shortcuts
    inputs = [x, 1.0 + 0.3 * draw([5], 2), draw([5], 3), *added]
    dy = draw(shape, 4)
    exact = [tf.cast(value, tf.float32) for value in inputs]
    expected = outputs_and_gradients(operations, exact, dy)
    expected[-1] *= (3 * 4 * 6 - 1) / (3 * 4 * 6)
    actual = outputs_and_gradients(program, inputs, dy)
    assert actual[0].dtype == actual[1].dtype == dtype
    for value, expected_value in zip(actual, expected, strict=True):
        value = tf.cast(value, tf.float32)
        np.testing.assert_allclose(
            value, expected_value, atol=tolerance * np.abs(expected_value).max(), rtol=0
        )


def test_convolve_and_keep_has_the_gradients_of_a_convolution_and_its_input(on_gpu):
    x = draw([2, 3, 5, 6], 0)
    kernel = draw([1, 1, 6, 4], 1)
    weights = draw([2, 3, 5, 10], 2)

    def separate(x, kernel):
        return (tf.concat([x, tf.nn.conv2d(x, kernel, 1, "VALID")], -1),)

    def together(x, kernel):
        return (tf.concat(shortcut_program.convolve_and_keep(x, kernel), -1),)

    expected = outputs_and_gradients(separate, [x, kernel], weights)
    actual = outputs_and_gradients(together, [x, kernel], weights)
    for value, expected_value in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-5)


def test_shortcut_is_the_first_result_of_its_operation(on_gpu):
    """TensorFlow's graph optimizer drops the index of a result that it adds to a normalization."""
    function = tf.function(shortcut_program.convolve_and_keep, autograph=False)
    shortcut, _ = function.get_concrete_function(
        tf.ones([2, 4, 4, 6]), tf.ones([1, 1, 6, 4])
    ).outputs
    while shortcut.op.type == "Identity":
        shortcut = shortcut.op.inputs[0]
    assert shortcut.op.type == "IdentityN"
    assert shortcut.value_index == 0


def create(name, programs=()):
    return factory.create(
        name, 5, 32, width=4, seed=3, batch_norm="moving", zero_last_gamma=False, programs=programs
    )


@pytest.mark.parametrize(("name", "forks"), [("resnet8", 0), ("resnet50_v1", 0), ("resnet50", 16)])
def test_network_with_all_programs_has_the_variables_of_its_layers(name, forks):
    plain = create(name)
    fused = create(name, PROGRAMS)
    assert [v.path for v in fused.variables] == [v.path for v in plain.variables]
    trainable = [v.path for v in fused.trainable_variables]
    assert trainable == [v.path for v in plain.trainable_variables]
    layers = fused.layers
    assert sum(isinstance(layer, fused_layers.ForkingConv2D) for layer in layers) == forks
    names = {layer.name for layer in layers}
    assert not any(name.endswith(("_relu", "_add")) for name in names)


def test_network_with_all_programs_has_the_results_of_its_layers(monkeypatch):
    monkeypatch.setattr(factory.resnet, "DEPTHS", {"resnet50": (2, 1)})
    plain = create("resnet50")
    fused = create("resnet50", PROGRAMS)
    images = draw([4, 32, 32, 3], 0)
    labels = tf.constant([0, 1, 2, 3], tf.int64)
    expected = training_pass(plain, images, labels)
    inference = plain(images, training=False)
    monkeypatch.setattr(xla, "has_gpu", lambda: True)
    monkeypatch.setattr(xla, "supported", lambda: True)
    actual = training_pass(fused, images, labels)
    for name, value in expected.items():
        tolerance = 1e-3 * np.abs(value).max() + 1e-6
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(fused(images, training=False), inference, rtol=1e-3, atol=1e-4)
