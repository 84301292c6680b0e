import numpy as np
import pytest

from hybrid_imagenet.models.layers import Conv2D, MaxPool2D
from tests.references import resnet_reference


@pytest.mark.parametrize(("size", "kernel", "stride", "pad"), [(8, 3, 2, 1), (9, 3, 2, 1), (8, 7, 2, 3), (7, 1, 2, 0)])
def test_convolution_pads_both_sides_alike(size, kernel, stride, pad):
    layer = Conv2D(5, kernel, strides=stride, pad=pad, use_bias=True, bias_initializer="ones")
    x = np.random.default_rng(0).normal(size=(2, size, size, 4)).astype(np.float32)
    outputs = layer(x).numpy()
    expected = resnet_reference.convolve(x, layer.kernel.numpy(), stride, pad) + 1
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    assert layer.compute_output_shape(x.shape) == outputs.shape
    again = Conv2D.from_config(layer.get_config())
    assert (again.pad, again.strides) == (pad, (stride, stride))


@pytest.mark.parametrize("size", [8, 9])
def test_pooling_of_non_negative_values(size):
    x = np.maximum(np.random.default_rng(0).normal(size=(2, size, size, 3)), 0).astype(np.float32)
    layer = MaxPool2D(3, 2, pad=1)
    outputs = layer(x).numpy()
    np.testing.assert_array_equal(outputs, resnet_reference.max_pool(x, 3, 2, 1))
    assert layer.compute_output_shape(x.shape) == outputs.shape
    assert MaxPool2D.from_config(layer.get_config()).pad == 1
