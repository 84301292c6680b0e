"""Kinds of variables, which decide on decay and trust ratios."""

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet import optimizers
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify, classify_by_rank
from hybrid_imagenet.optimizers.lamb import LAMB
from hybrid_imagenet.optimizers.lars import LARS
from hybrid_imagenet.optimizers.muon import Muon
from tests.optimizers.support import Problem, Runner


def test_classify_uses_the_layers_instead_of_names():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="batch_norm_bias_gamma")(inputs)
    x = keras.layers.BatchNormalization(name="conv")(x)
    inner = keras.Sequential(
        [keras.Input((6, 6, 4)), keras.layers.DepthwiseConv2D(3), keras.layers.LayerNormalization()]
    )
    x = keras.layers.GlobalAveragePooling2D()(inner(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    assert [kind.value for kind in classify(model)] == [
        *("kernel", "bias", "norm_scale", "norm_offset"),
        *("kernel", "bias", "norm_scale", "norm_offset"),
        *("kernel", "bias"),
    ]


class LayerScale(keras.layers.Layer):
    """Multiplies by a vector, as in ConvNeXt."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:])

    def call(self, x):
        return self.gamma * x


def test_classify_gamma_of_a_layer_that_does_not_normalize_is_a_scale():
    model = keras.Sequential([keras.Input((2,)), LayerScale(), keras.layers.Dense(2)])
    assert classify(model) == [
        ParameterKind.NORM_SCALE,
        ParameterKind.KERNEL,
        ParameterKind.BIAS,
    ]


def test_classify_by_rank_takes_matrices_for_kernels_and_vectors_for_biases():
    variables = [keras.Variable([[1.0]]), keras.Variable([1.0])]
    assert classify_by_rank(variables) == [ParameterKind.KERNEL, ParameterKind.BIAS]


@pytest.mark.parametrize(
    ("optimizer", "moved"),
    [
        # LARS takes the plain step, LAMB the step of Adam, and Muon that of Nesterov momentum.
        (lambda: LARS(0.5, weight_decay=0.2), 0.5 * 0.25),
        (lambda: LAMB(0.5, eps=1e-12, weight_decay=0.2), 0.5),
        (lambda: Muon(0.5, 0.9), 0.5 * 1.9 * 0.25),
    ],
    ids=["lars", "lamb", "muon"],
)
def test_step_of_kinds_other_than_kernels_has_no_decay_for_any_shape(optimizer, moved):
    kinds = [ParameterKind.BIAS, ParameterKind.NORM_SCALE, ParameterKind.NORM_OFFSET]
    problem = Problem([(2, 2)] * 3)
    before = [np.array([[0.4, -0.3], [0.2, 0.7]], np.float32)] * 3
    problem.start = before
    runner = Runner(optimizer(), problem, kinds=kinds)
    runner.step(grads=[np.full((2, 2), 0.25)] * 3)
    for after, start in zip(runner.weights(), before, strict=True):
        np.testing.assert_allclose(after, start - moved, rtol=1e-5)


def test_create_of_an_unknown_name_is_rejected():
    with pytest.raises(ValueError, match="optimizer=adam"):
        optimizers.create("adam")


def trained_by(optimizer, layer, shape, callbacks=()):
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    model.compile(optimizer, "mse", run_eagerly=True)
    x = np.ones((4, *shape), np.float32)
    model.fit(x, np.zeros((4, *model.output_shape[1:])), verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize("wrapped", [False, True])
def test_bias_of_two_dimensions_without_a_known_model_is_rejected(wrapped):
    def create():
        return (
            hi.DistributedOptimizer(hi.optimizers.LARS(0.1)) if wrapped else hi.optimizers.LARS(0.1)
        )

    for layer, shape in (
        (keras.layers.GRU(3), (4, 2)),
        (keras.layers.EinsumDense("ab,bcd->acd", (2, 3), bias_axes="cd"), (4,)),
        (keras.layers.LayerNormalization(axis=[1, 2]), (4, 2)),
    ):
        with pytest.raises(
            UserError, match=r"not know whether .* is a kernel or a bias.*default_callbacks\(\) to"
        ):
            trained_by(create(), layer, shape)
    optimizer = create()
    trained_by(optimizer, keras.layers.GRU(3), (4, 2), hi.callbacks.default_callbacks())
    kinds = optimizer.inner.kinds if wrapped else optimizer.kinds
    assert [kind.value for kind in kinds] == ["kernel", "kernel", "bias"]


def test_float16_weights_are_rejected_with_the_policy_to_use():
    with pytest.raises(
        UserError,
        match=r"lars updates float32 weights only, but .* is float16.*policy mixed_float16",
    ):
        trained_by(hi.optimizers.LARS(0.1), keras.layers.Dense(2, dtype="float16"), (4,))


def test_float8_variables_are_rejected():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.quantize("float8")
    for optimizer in (hi.DistributedOptimizer("sgd"), hi.optimizers.SGD(0.1)):
        with pytest.raises(UserError, match=r"training in float8 .* is not supported\. Use the"):
            optimizer.build(model.trainable_variables)


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [("float64", "float32"), ("bfloat16", "mixed_bfloat16"), ("float16", "mixed_float16")],
)
def test_weights_of_another_type_are_rejected_with_a_policy_that_keras_has(dtype, policy):
    variable = keras.Variable(np.ones(3), dtype=dtype)
    with pytest.raises(
        UserError, match=f"Use the dtype policy {policy}, which has float32 weights"
    ):
        hi.optimizers.SGD(0.1).build([variable])
    keras.dtype_policies.get(policy)
