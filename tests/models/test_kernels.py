"""What the traced training graph must look like for a GPU to run it well; tracing needs no GPU."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.models import factory, kernels, layers


def traced_nodes(precision, name="resnet50"):
    """The operations of forward and backward pass over normalized images in the compute type."""
    model = factory.create(name, 10, 64, precision=precision)
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def gradients(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return tape.gradient(loss, variables)

    images = tf.TensorSpec([2, 64, 64, 3], model.input.dtype)
    graph = gradients.get_concrete_function(images, tf.TensorSpec([2], tf.int32)).graph
    convolutions = sum(isinstance(layer, keras.layers.Conv2D) for layer in model.layers)
    return graph.get_operations(), convolutions


@pytest.mark.parametrize(("pad", "channels"), [(3, 3), (0, 3), (3, 8)])
def test_a_stem_on_squares_of_pixels_is_the_stem_on_pixels(pad, channels, monkeypatch):
    random = np.random.default_rng(0)
    images, kernel = (
        tf.constant(random.normal(size=s)) for s in ([2, 20, 24, channels], [7, 7, channels, 8])
    )
    found = []
    for gpu in (False, True):
        monkeypatch.setattr(kernels, "has_gpu", lambda gpu=gpu: gpu)
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs = kernels.conv2d(images, kernel, 2, pad)
            loss = tf.reduce_sum(outputs * tf.sin(outputs))
        found.append([outputs.numpy(), tape.gradient(loss, kernel).numpy()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12 * np.abs(one).max())


@pytest.fixture(scope="module")
def traced():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "has_gpu", lambda: True)
        operations, convolutions = traced_nodes("mixed_float16")
    return operations, convolutions, tf.float16


def of_type(operations, *types):
    return [op for op in operations if op.type in types]


def test_every_convolution_computes_in_half_precision_nhwc(traced):
    operations, count, half = traced
    forward = of_type(operations, "Conv2D")
    backward = of_type(operations, "Conv2DBackpropInput", "Conv2DBackpropFilter")
    assert len(forward) == count == 53
    assert (
        len(backward) == 2 * count
    )  # that of the images is traced, and pruned when the graph is compiled
    for op in forward + backward:
        assert op.get_attr("T") == half, op.name
        assert op.get_attr("data_format") == b"NHWC", op.name


def test_normalization_is_fused_with_float_statistics(traced):
    operations, count, half = traced
    forward = of_type(operations, "FusedBatchNormV3")
    backward = of_type(operations, "FusedBatchNormGradV3")
    assert len(forward) == len(backward) == count
    for op in forward + backward:
        assert (op.get_attr("T"), op.get_attr("U")) == (half, tf.float32), op.name
        assert op.get_attr("data_format") == b"NHWC", op.name


def test_nothing_between_the_layers_is_wider_than_the_compute_type(traced):
    operations, _, half = traced
    for op in of_type(
        operations, "Relu", "ReluGrad", "AddV2", "AddN", "MaxPool", "MaxPoolGrad", "Pad"
    ):
        if op.outputs[0].shape.rank == 4:
            assert op.outputs[0].dtype == half, op.name


def test_float32_has_no_casts_between_float_types():
    operations, _ = traced_nodes("float32", "resnet10")
    assert not [op for op in of_type(operations, "Cast") if op.get_attr("SrcT").is_floating]


def network():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    x = images = keras.Input((8, 8, 3))
    for number, filters in enumerate((32, 5, 4)):
        x = layers.Conv2D(
            filters, 3, pad=1, dtype=policy, use_bias=number == 1, trainable=number != 1
        )(x)
    return keras.Model(images, layers.Conv2D(2, 1, dtype="float32")(x))


def test_outputs_and_gradients_are_the_same():
    model = network()
    images = tf.constant(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), tf.float32)
    held = layers.cast_kernels(model)
    assert [(k.shape, dtype) for k, dtype in held] == [
        ((3, 3, 3, 32), "float16"),
        ((3, 3, 5, 4), "float16"),
    ]
    with tf.GradientTape() as tape:
        expected = model(images)
    wanted = tape.gradient(expected, [k.value for k, _ in held])
    with kernels.cast_together(held) as cast, tf.GradientTape() as tape:
        sources = [cast[id(k)] for k, _ in held]
        tape.watch(sources)
        outputs = model(images)
    np.testing.assert_array_equal(outputs, expected)
    for found, gradient in zip(tape.gradient(outputs, sources), wanted, strict=True):
        assert found.dtype == tf.float16
        np.testing.assert_array_equal(tf.cast(found, tf.float32), gradient)


def test_afterwards_layers_cast_by_themselves():
    model = network()
    held = layers.cast_kernels(model)
    images = tf.ones([1, 8, 8, 3])
    with kernels.cast_together(held):
        before = model(images)
    held[0][0].assign(tf.zeros_like(held[0][0]))
    assert np.abs(model(images) - before).max() > 0
    with kernels.cast_together([]) as cast:
        assert not cast
