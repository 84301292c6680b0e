"""Models in float8: Keras passes new values as gradients for some variables.

tests/library/test_float8.py tests several ranks.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.overwritten import Partition
from tests.library import float8

# Each entry wraps SGD differently, with a learning rate of 0.1.
OPTIMIZERS = {
    "hi alone": lambda **options: hi.optimizers.SGD(0.1, momentum=0.0),
    "hi per variable": lambda **options: hi.DistributedOptimizer(
        hi.optimizers.SGD(0.1, momentum=0.0), packed=False, **options
    ),
    "hi packed": lambda **options: hi.DistributedOptimizer(
        hi.optimizers.SGD(0.1, momentum=0.0), packed=True, **options
    ),
    "keras": lambda **options: hi.DistributedOptimizer(keras.optimizers.SGD(0.1), **options),
}


@pytest.fixture(scope="module")
def keras_model():
    """Returns a model that Keras alone has trained."""
    return float8.train(float8.compiled(keras.optimizers.SGD(0.1)))


def check_equals(model, expected):
    """Checks that float8 variables are equal, and weights equal except for the order of sums."""
    ours = Partition(model.trainable_variables)
    theirs = Partition(expected.trainable_variables)
    assert len(ours.overwritten) == 6
    for variable, other in zip(ours.overwritten, theirs.overwritten, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), err_msg=variable.path)
    for variable, other in zip(ours.updated, theirs.updated, strict=True):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float8_steps_equal_keras_and_a_step_whose_input_overflows_is_skipped(name, keras_model):
    model = float8.train(float8.compiled(OPTIMIZERS[name](loss_scale=LossScale(1, dynamic=True))))
    check_equals(model, keras_model)
    assert model.layers[0].inputs_scale.numpy() != 1
    before = [v.numpy() for v in model.trainable_variables]
    x, y = float8.batches()[0]
    # A cast to float8 limits the input, so all gradients are finite.
    x[0, 0] = np.inf
    model.train_on_batch(x, y)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)
    assert model.optimizer.iterations.numpy() == float8.BATCHES
    if name != "hi alone":
        assert not np.isfinite(model.optimizer.grad_norm.numpy())
        assert model.optimizer.loss_scale.skipped_steps.numpy() == 1
        assert model.optimizer.non_finite_variables() == ["network/scores/inputs_amax_history"]


def test_float8_with_accumulation_takes_the_largest_new_value_as_keras_does():
    expected = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer = OPTIMIZERS["keras"](loss_scale=1, gradient_accumulation_steps=2)
    model = float8.train(float8.compiled(optimizer))
    check_equals(model, float8.train(float8.compiled(expected)))


@pytest.mark.parametrize(
    ("name", "loss_is_scaled"), [*((name, False) for name in OPTIMIZERS), ("keras", True)]
)
def test_overwritten_variable_takes_its_value_and_changes_nothing_else(name, loss_is_scaled):
    """The value would dominate every norm, and its square is infinite in FP32."""
    replaced = keras.Variable(np.ones(3, np.float32), name="replaced")
    replaced.overwrite_with_gradient = True
    weight = keras.Variable(np.zeros((2, 2), np.float32), name="weight")
    optimizer = OPTIMIZERS[name](communicator=SingleProcess(), loss_scale=1024.0)
    inner = getattr(optimizer, "inner", optimizer)
    inner.global_clipnorm = 1.0
    gradient = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    if loss_is_scaled:
        gradient *= float(optimizer.scale_loss(tf.constant(1.0)))
    new_value = np.array([1e30, 0.0, -1.0], np.float32)
    optimizer.apply([tf.constant(new_value), tf.constant(gradient)], [replaced, weight])
    np.testing.assert_array_equal(replaced.numpy(), new_value)
    np.testing.assert_allclose(weight.numpy(), [[-0.06, 0.0], [0.0, -0.08]], rtol=1e-6)
    if name != "hi alone":
        assert optimizer.grad_norm.numpy() == pytest.approx(5)
    assert not any(v.shape == (3,) for v in inner.variables)


def test_overwritten_variable_without_a_new_value_is_an_error_that_names_the_remedy():
    replaced = keras.Variable(1.0, name="replaced")
    replaced.overwrite_with_gradient = True
    optimizer = OPTIMIZERS["keras"](communicator=SingleProcess(), loss_scale=1)
    with pytest.raises(ValueError, match=r"new values for replaced, .*with training=True"):
        optimizer.apply([None, tf.constant(1.0)], [replaced, keras.Variable(0.0)])


def test_float8_with_weight_averages_of_keras_ends_with_the_averages(keras_model):
    inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model = float8.train(float8.compiled(hi.DistributedOptimizer(inner, loss_scale=1)))
    check_equals(model, keras_model)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    partition = Partition(model.trainable_variables)
    averages = inner._model_variables_moving_average
    for variable, average in zip(partition.updated, averages, strict=True):
        np.testing.assert_array_equal(variable.numpy(), average.numpy())
    last = Partition(keras_model.trainable_variables)
    assert not np.array_equal(partition.updated[0].numpy(), last.updated[0].numpy())
    for variable, other in zip(partition.overwritten, last.overwritten, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())


def test_float8_saved_model_continues_within_an_accumulation(tmp_path):
    def model():
        inner = hi.optimizers.SGD(0.1, momentum=0.9)
        optimizer = hi.DistributedOptimizer(inner, gradient_accumulation_steps=float8.BATCHES + 2)
        return float8.compiled(optimizer)

    whole = float8.train(float8.train(model()))
    assert whole.optimizer.iterations.numpy() == 1
    float8.train(model()).save(tmp_path / "half.keras")
    check_equals(float8.train(hi.load_model(tmp_path / "half.keras")), whole)
