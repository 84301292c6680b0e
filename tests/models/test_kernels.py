"""The traced training graph has the form that a GPU runs fast; the tests need no GPU."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.models import factory, kernels, layers


def traced_nodes(precision, name="resnet50"):
    """Returns the operations of forward and backward pass, and the number of convolutions."""
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
def test_stem_on_pixel_blocks_has_the_values_and_gradients_of_the_stem_on_pixels(
    pad, channels, monkeypatch
):
    random = np.random.default_rng(0)
    images, kernel = (
        tf.constant(random.normal(size=s)) for s in ([2, 20, 24, channels], [7, 7, channels, 8])
    )
    results = []
    for gpu in (False, True):
        monkeypatch.setattr(kernels, "has_gpu", lambda gpu=gpu: gpu)
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs = kernels.conv2d(images, kernel, 2, pad)
            loss = tf.reduce_sum(outputs * tf.sin(outputs))
        results.append([outputs.numpy(), tape.gradient(loss, kernel).numpy()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12 * np.abs(one).max())


@pytest.fixture(scope="module")
def traced():
    """Returns the operations of a network in FP16, the number of its convolutions, and the type."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "has_gpu", lambda: True)
        operations, convolutions = traced_nodes("mixed_float16")
    return operations, convolutions, tf.float16


def of_type(operations, *types):
    """Returns the operations of these types."""
    return [op for op in operations if op.type in types]


def test_graph_in_half_precision_runs_every_convolution_in_nhwc(traced):
    operations, count, half = traced
    forward = of_type(operations, "Conv2D")
    backward = of_type(operations, "Conv2DBackpropInput", "Conv2DBackpropFilter")
    assert len(forward) == count == 53
    # The gradient of the images is traced too. It is pruned when the graph is compiled.
    assert len(backward) == 2 * count
    for op in forward + backward:
        assert op.get_attr("T") == half, op.name
        assert op.get_attr("data_format") == b"NHWC", op.name


def test_graph_in_half_precision_fuses_normalization_with_float32_statistics(traced):
    operations, count, half = traced
    forward = of_type(operations, "FusedBatchNormV3")
    backward = of_type(operations, "FusedBatchNormGradV3")
    assert len(forward) == len(backward) == count
    for op in forward + backward:
        assert (op.get_attr("T"), op.get_attr("U")) == (half, tf.float32), op.name
        assert op.get_attr("data_format") == b"NHWC", op.name


def test_graph_in_half_precision_has_no_wider_tensors_between_layers(traced):
    operations, _, half = traced
    for op in of_type(
        operations, "Relu", "ReluGrad", "AddV2", "AddN", "MaxPool", "MaxPoolGrad", "Pad"
    ):
        if op.outputs[0].shape.rank == 4:
            assert op.outputs[0].dtype == half, op.name


def test_graph_in_float32_has_no_casts_between_float_types():
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


def test_fused_kernel_casts_keep_outputs_and_gradients():
    model = network()
    images = tf.constant(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), tf.float32)
    to_cast = layers.kernels_to_cast(model)
    assert [(k.shape, dtype) for k, dtype in to_cast] == [
        ((3, 3, 3, 32), "float16"),
        ((3, 3, 5, 4), "float16"),
    ]
    with tf.GradientTape() as tape:
        expected = model(images)
    expected_gradients = tape.gradient(expected, [k.value for k, _ in to_cast])
    with kernels.fused_kernel_casts(to_cast) as cast, tf.GradientTape() as tape:
        sources = [cast[id(k)] for k, _ in to_cast]
        tape.watch(sources)
        outputs = model(images)
    np.testing.assert_array_equal(outputs, expected)
    gradients = tape.gradient(outputs, sources)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == tf.float16
        np.testing.assert_array_equal(tf.cast(gradient, tf.float32), expected_gradient)


def test_layers_after_fused_kernel_casts_use_the_current_kernels():
    model = network()
    to_cast = layers.kernels_to_cast(model)
    images = tf.ones([1, 8, 8, 3])
    with kernels.fused_kernel_casts(to_cast):
        before = model(images)
    to_cast[0][0].assign(tf.zeros_like(to_cast[0][0]))
    assert np.abs(model(images) - before).max() > 0
    with kernels.fused_kernel_casts([]) as cast:
        assert not cast
