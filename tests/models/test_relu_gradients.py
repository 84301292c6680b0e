import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.models.kernels import shapes_first


@pytest.mark.parametrize("number", [0.5, 1e30, float("nan")])
def test_losses_stay_what_they_are_whatever_the_gradient(number):
    losses = tf.constant([0.25, 3.0])
    found = tf.function(lambda: shapes_first(losses, [tf.fill([3, 3, 3, 8], number)]))()
    np.testing.assert_array_equal(found, losses)


def test_the_pair_lies_behind_the_first_gradient_and_before_the_losses():
    specs = (tf.TensorSpec([2]), tf.TensorSpec([3, 3, 3, 8]))
    graph = tf.function(lambda losses, gradient: shapes_first(losses, [gradient])).get_concrete_function(*specs).graph
    relu = next(op for op in graph.get_operations() if op.type == "Relu")
    assert any(relu in op.control_inputs for op in graph.get_operations() if op.type == "Identity")
    assert relu.inputs[0].op.type == "FusedBatchNormV3"
