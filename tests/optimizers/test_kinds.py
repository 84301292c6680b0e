import keras
import numpy as np
import pytest

from hybrid_imagenet import optimizers
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify, classify_by_rank
from hybrid_imagenet.optimizers.lamb import LAMB
from hybrid_imagenet.optimizers.lars import LARS
from hybrid_imagenet.optimizers.muon import Muon
from tests.optimizers.support import Problem, Runner


def test_kinds_come_from_the_layers_and_not_from_names():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="batch_norm_bias_gamma")(inputs)
    x = keras.layers.BatchNormalization(name="conv")(x)
    inner = keras.Sequential(
        [keras.Input((6, 6, 4)), keras.layers.DepthwiseConv2D(3), keras.layers.LayerNormalization()]
    )
    x = keras.layers.GlobalAveragePooling2D()(inner(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    k, b = ParameterKind.KERNEL, ParameterKind.BIAS
    scale, offset = ParameterKind.NORM_SCALE, ParameterKind.NORM_OFFSET
    assert classify(model) == [k, b, scale, offset, k, b, scale, offset, k, b]


def test_without_a_model_the_rank_decides():
    variables = [keras.Variable([[1.0]]), keras.Variable([1.0])]
    assert classify_by_rank(variables) == [ParameterKind.KERNEL, ParameterKind.BIAS]


@pytest.mark.parametrize(
    ("optimizer", "moved"),
    [
        (lambda: LARS(0.5, weight_decay=0.2), 0.5 * 0.25),  # the plain step
        (lambda: LAMB(0.5, eps=1e-12, weight_decay=0.2), 0.5),  # Adam's
        (lambda: Muon(0.5, 0.9, other_rate=0.1), 0.5 * 0.1 * 1.9 * 0.25),  # that of momentum
    ],
    ids=["lars", "lamb", "muon"],
)
def test_other_kinds_than_kernels_take_a_step_without_decay_whatever_their_shape(optimizer, moved):
    kinds = [ParameterKind.BIAS, ParameterKind.NORM_SCALE, ParameterKind.NORM_OFFSET]
    problem = Problem([(2, 2)] * 3)
    problem.start = before = [np.array([[0.4, -0.3], [0.2, 0.7]], np.float32)] * 3
    runner = Runner(optimizer(), problem, kinds=kinds)
    runner.step(grads=[np.full((2, 2), 0.25)] * 3)
    for now, start in zip(runner.weights(), before, strict=True):
        np.testing.assert_allclose(now, start - moved, rtol=1e-5)


def test_create_refuses_a_name_that_it_does_not_know():
    with pytest.raises(ValueError, match="optimizer=adam"):
        optimizers.create("adam")
