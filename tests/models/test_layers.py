"""Convolution and pooling: padding, and the forms for GPUs and CPUs."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.models import kernels
from hybrid_imagenet.models.layers import Conv2D, MaxPool2D
from tests.references import resnet_reference


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad"), [(8, 3, 2, 1), (9, 3, 2, 1), (8, 7, 2, 3), (7, 1, 2, 0)]
)
def test_conv2d_pads_both_sides_equally(size, kernel, stride, pad):
    layer = Conv2D(5, kernel, strides=stride, pad=pad, use_bias=True, bias_initializer="ones")
    x = np.random.default_rng(0).normal(size=(2, size, size, 4)).astype(np.float32)
    outputs = layer(x).numpy()
    expected = resnet_reference.convolve(x, layer.kernel.numpy(), stride, pad) + 1
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    assert layer.compute_output_shape(x.shape) == outputs.shape
    copy = Conv2D.from_config(layer.get_config())
    assert (copy.pad, copy.strides) == (pad, (stride, stride))


@pytest.mark.parametrize("size", [8, 9])
def test_max_pool2d_of_non_negative_values_equals_the_oracle(size):
    x = np.maximum(np.random.default_rng(0).normal(size=(2, size, size, 3)), 0).astype(np.float32)
    layer = MaxPool2D(3, 2, pad=1)
    outputs = layer(x).numpy()
    np.testing.assert_array_equal(outputs, resnet_reference.max_pool(x, 3, 2, 1))
    assert layer.compute_output_shape(x.shape) == outputs.shape
    assert MaxPool2D.from_config(layer.get_config()).pad == 1


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad"), [(8, 3, 2, 1), (9, 3, 2, 1), (8, 7, 2, 3), (7, 1, 2, 0)]
)
def test_conv2d_and_max_pool_in_the_form_for_gpus_equal_the_form_for_cpus(
    monkeypatch, size, kernel, stride, pad
):
    """Covers padding, which a GPU applies inside the convolution and the pooling after a ReLU."""
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(2, size, size, 4)).astype(np.float32))
    weights = tf.constant(random.normal(size=(kernel, kernel, 4, 6)).astype(np.float32))

    def pooled(x, weights):
        return kernels.max_pool(tf.nn.relu(kernels.conv2d(x, weights, stride, pad)), 3, 2, 1)

    results = []
    for cpu in (True, False):
        monkeypatch.setattr(kernels, "has_gpu", lambda cpu=cpu: not cpu)
        side = (size + 2 * pad - kernel) // stride // 2 + 1
        results.append(gradients(pooled, x, weights, tf.ones([2, side, side, 6])))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


def gradients(convolve, x, kernel, dy):
    with tf.GradientTape() as tape:
        tape.watch([x, kernel])
        outputs = convolve(x, kernel)
    return outputs, *tape.gradient(outputs, [x, kernel], dy)


@pytest.mark.parametrize("batch_known", [True, False])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad", "channels", "dtype"),
    [
        (6, 1, 1, 0, 8, tf.float32),
        (6, 1, 2, 0, 8, tf.float32),
        (5, 1, 2, 0, 8, tf.float32),
        (6, 3, 1, 1, 8, tf.float32),
        (6, 3, 2, 1, 8, tf.float32),
        (5, 3, 2, 1, 8, tf.float32),
        (4, 3, 1, 1, 256, tf.bfloat16),
        (6, 3, 2, 1, 16, tf.bfloat16),
        (8, 7, 2, 3, 3, tf.float32),
        (8, 11, 4, 2, 3, tf.float32),
    ],
)
def test_conv2d_in_the_forms_for_cpus_equals_the_plain_convolution(
    size, kernel, stride, pad, channels, dtype, batch_known
):
    random = np.random.default_rng(0)
    x = tf.cast(random.normal(size=(2, size, size, channels)), dtype)
    weights = tf.cast(random.normal(size=(kernel, kernel, channels, 12)), dtype)

    def plain(x, k):
        sides = [[0, 0], [pad, pad], [pad, pad], [0, 0]]
        return tf.nn.conv2d(
            tf.pad(tf.cast(x, tf.float32), sides), tf.cast(k, tf.float32), stride, "VALID"
        )

    dy = tf.cast(random.normal(size=plain(x, weights).shape), dtype)
    batch = [2 if batch_known else None]
    signature = [tf.TensorSpec(batch + list(t.shape[1:]), dtype) for t in (x, dy)]
    ours = tf.function(
        lambda x, dy: gradients(lambda x, k: kernels.conv2d(x, k, stride, pad), x, weights, dy),
        input_signature=signature,
    )
    expected = gradients(plain, x, weights, tf.cast(dy, tf.float32))
    for actual, expected_value in zip(ours(x, dy), expected, strict=True):
        assert actual.dtype == dtype
        expected_value = tf.cast(expected_value, tf.float32).numpy()
        tolerance = 1e-5 if dtype == tf.float32 else 0.02
        np.testing.assert_allclose(
            tf.cast(actual, tf.float32),
            expected_value,
            atol=tolerance * np.abs(expected_value).max(),
        )


def operations_of(size, kernel, stride, channels, dtype):
    def function(x, k, dy):
        return gradients(lambda x, k: kernels.conv2d(x, k, stride, kernel // 2), x, k, dy)

    shapes = [(2, size, size, channels), (kernel, kernel, channels, channels)]
    shapes.append((2, size // stride, size // stride, channels))
    specs = [tf.TensorSpec(shape, dtype) for shape in shapes]
    return [
        op.type for op in tf.function(function).get_concrete_function(*specs).graph.get_operations()
    ]


def test_conv2d_selects_the_form_by_device_shape_and_type(monkeypatch):
    monkeypatch.setattr(kernels, "has_gpu", lambda: False)
    assert not any(op.startswith("Conv2D") for op in operations_of(4, 1, 2, 8, tf.float32))
    strided = operations_of(4, 3, 2, 64, tf.float32)
    assert strided.count("MatMul") == 9
    assert "Conv2DBackpropFilter" not in strided
    assert "MatMul" not in operations_of(4, 3, 2, 63, tf.float32)
    assert "MatMul" in operations_of(4, 3, 1, 256, tf.bfloat16)
    assert "MatMul" not in operations_of(4, 3, 1, 128, tf.bfloat16)
    assert "MatMul" not in operations_of(4, 3, 1, 256, tf.float32)
    monkeypatch.setattr(kernels, "has_gpu", lambda: True)
    for kernel, stride in ((1, 1), (1, 2), (3, 1), (3, 2)):
        assert "MatMul" not in operations_of(4, kernel, stride, 256, tf.bfloat16)


def test_max_pool_compiled_by_xla_equals_the_plain_pooling(monkeypatch):
    """XLA does not support pooling with explicit padding, so --jit_compile would fail on a GPU."""
    monkeypatch.setattr(kernels, "has_gpu", lambda: True)
    images = tf.constant(np.random.default_rng(0).uniform(size=(2, 9, 9, 3)), tf.float32)
    pool = lambda x: kernels.max_pool(x, 3, 2, 1)  # noqa: E731
    compiled = tf.function(pool, autograph=False, jit_compile=True)
    np.testing.assert_array_equal(compiled(images), tf.function(pool, autograph=False)(images))
