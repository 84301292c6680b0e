"""Initial weights: their distribution and their seeds."""

import numpy as np
import pytest

from hybrid_imagenet.models import factory
from hybrid_imagenet.models.blocks import convolution_initializer

SHAPE = (3, 3, 64, 128)
FAN_IN = 9 * 64
FAN_OUT = 9 * 128


@pytest.mark.parametrize(
    ("kind", "stddev"),
    [
        ("kaiming", np.sqrt(2 / FAN_IN)),
        ("xavier", np.sqrt(2 / (FAN_IN + FAN_OUT))),
        ("gaussian", 1.0),
    ],
)
def test_convolution_initializer_has_the_expected_mean_and_deviation(kind, stddev):
    values = np.asarray(convolution_initializer(kind, 1, "layer")(SHAPE))
    count = values.size
    assert abs(values.mean()) < 5 * stddev / np.sqrt(count)
    assert abs(values.std() / stddev - 1) < 5 / np.sqrt(count)


def test_convolution_initializer_kaiming_is_not_truncated():
    values = np.asarray(convolution_initializer("kaiming", 1, "layer")(SHAPE)) / np.sqrt(2 / FAN_IN)
    # A truncated Gaussian has no values beyond 2 deviations.
    assert abs(np.mean(np.abs(values) > 2) - 0.0455) < 0.005
    assert abs(np.mean(values**4) - 3) < 0.1
    assert np.abs(values).max() > 3.5


def test_classifier_begins_gaussian_with_deviation_001_and_zero_bias():
    dense = factory.create("resnet18", 100, 32).get_layer("logits")
    assert abs(dense.kernel.numpy().std() / 0.01 - 1) < 0.03
    assert not dense.bias.numpy().any()


def test_seed_of_a_network_repeats_weights_that_differ_by_layer():
    first = factory.create("resnet10", 4, 32, seed=5)
    same_seed = factory.create("resnet10", 4, 32, seed=5)
    other = factory.create("resnet10", 4, 32, seed=6)
    for a, b, c in zip(first.variables, same_seed.variables, other.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
        if a.ndim > 1 and "bias" not in a.name:
            assert not np.array_equal(a.numpy(), c.numpy())
    kernels = [first.get_layer(f"stage1_block1_{j}_conv").kernel.numpy() for j in (1, 2)]
    assert all(not np.array_equal(kernels[0], k) for k in kernels[1:])
