"""Kernels that are cast together: the same values and gradients as if each layer cast its own."""

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.models import kernels as forms
from hybrid_imagenet.models import layers


def network():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    x = images = keras.Input((8, 8, 3))
    for number, filters in enumerate((32, 5, 4)):
        x = layers.Conv2D(filters, 3, pad=1, dtype=policy, use_bias=number == 1, trainable=number != 1)(x)
    return keras.Model(images, layers.Conv2D(2, 1, dtype="float32")(x))


def test_outputs_and_gradients_are_the_same():
    model = network()
    images = tf.constant(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), tf.float32)
    kernels = layers.cast_kernels(model)
    assert [(k.shape, dtype) for k, dtype in kernels] == [((3, 3, 3, 32), "float16"), ((3, 3, 5, 4), "float16")]
    with tf.GradientTape() as tape:
        expected = model(images)
    wanted = tape.gradient(expected, [k.value for k, _ in kernels])
    with forms.cast_together(kernels) as cast, tf.GradientTape() as tape:
        sources = [cast[id(k)] for k, _ in kernels]
        tape.watch(sources)
        outputs = model(images)
    np.testing.assert_array_equal(outputs, expected)
    for found, gradient in zip(tape.gradient(outputs, sources), wanted, strict=True):
        assert found.dtype == tf.float16
        np.testing.assert_array_equal(tf.cast(found, tf.float32), gradient)


def test_afterwards_layers_cast_by_themselves():
    model = network()
    kernels = layers.cast_kernels(model)
    images = tf.ones([1, 8, 8, 3])
    with forms.cast_together(kernels):
        before = model(images)
    kernels[0][0].assign(tf.zeros_like(kernels[0][0]))
    assert np.abs(model(images) - before).max() > 0
    with forms.cast_together([]) as cast:
        assert not cast
