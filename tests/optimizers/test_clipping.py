"""Clipping by the global norm of all gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.adamw import AdamW
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.lars import LARS
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.sgd import SGD
from tests.optimizers.support import Problem, Runner, assert_close
from tests.references import optimizers_reference as reference

LIMIT = 0.5


def step_once(grads, *, packed, **arguments):
    """Takes one step of SGD with a learning rate of 1 from zeros.

    Returns minus the gradients that it used, and their norm.
    """
    variables = [keras.Variable(np.zeros(g.shape, np.float32)) for g in grads]
    optimizer = DistributedOptimizer(
        optimizers.create("sgd", learning_rate=1.0, momentum=0.0, **arguments),
        loss_scale=LossScale(256.0),
        communicator=SingleProcess(),
        packed=packed,
    )
    optimizer.build(variables)
    tf.function(optimizer.accumulate_or_update, autograph=False)([256 * g for g in grads])
    return [-v.numpy() for v in variables], float(optimizer.grad_norm.numpy())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_clip_norm_gradients_equal_those_of_tensorflow(size, packed):
    random = np.random.default_rng(0)
    # The first has more elements than the vector of small variables takes.
    shapes = ((80, 60), (5,), (3, 3, 2, 4))
    grads = [tf.constant(size * random.normal(size=s), tf.float32) for s in shapes]
    clipped, norm = tf.clip_by_global_norm(grads, LIMIT)
    used, logged = step_once(grads, packed=packed, global_clipnorm=LIMIT)
    assert logged == pytest.approx(float(norm), rel=1e-5)
    for value, expected in zip(used, clipped, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_clip_norm_above_the_norm_changes_no_bit(packed):
    grads = [tf.constant([[0.1, -0.2]]), tf.constant([0.3])]
    plain, _ = step_once(grads, packed=packed)
    clipped, _ = step_once(grads, packed=packed, global_clipnorm=10.0)
    for value, expected in zip(clipped, plain, strict=True):
        np.testing.assert_array_equal(value, expected)


def sgd(layer, grad, step, rate):
    reference.sgd_step(layer, grad, rate, 0.9, decay=0.1)


def lars(layer, grad, step, rate):
    reference.lars_step(layer, grad, rate, 0.9, decay=0.1, trust_coefficient=0.02)


def adamw(layer, grad, step, rate):
    reference.adamw_step(layer, grad, step + 1, rate, decay=0.1)


STEPS = {
    "sgd": (SGD, {}, sgd),
    "lars": (LARS, {"trust_coefficient": 0.02}, lars),
    "adamw": (AdamW, {}, adamw),
}


@pytest.mark.parametrize("name", STEPS)
def test_clip_norm_60_steps_follow_the_oracle_with_clipped_gradients(name):
    optimizer_class, options, oracle = STEPS[name]
    optimizer = optimizer_class(0.02, weight_decay=0.1, global_clipnorm=LIMIT, **options)
    problem = Problem()
    runner = Runner(optimizer, problem, loss_scale=2.0**15)
    layers = problem.layers()
    num_clipped = 0
    for step in range(60):
        runner.step()
        grads = problem.grads([layer["w"] for layer in layers], step)
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        num_clipped += norm > LIMIT
        for layer, grad in zip(layers, grads, strict=True):
            oracle(layer, grad * min(1.0, LIMIT / norm), step, 0.02)
    assert num_clipped > 10
    assert_close(runner.weights(), layers)


def test_clip_norm_of_a_gradient_that_is_not_finite_skips_the_step():
    runner = Runner(SGD(0.1, global_clipnorm=LIMIT), Problem())
    before = runner.weights()
    grads = runner.problem.grads(before, 0)
    grads[1][0] = np.inf
    runner.step(grads=grads)
    for value, expected in zip(runner.weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert runner.count == 0


def test_clip_norm_set_later_is_saved_with_the_optimizer():
    optimizer = SGD(0.1)
    optimizer.global_clipnorm = 2.0
    assert SGD.from_config(optimizer.get_config()).global_clipnorm == 2.0


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_clip_norm_that_is_not_positive_is_rejected(value):
    with pytest.raises(ValueError, match=r"global_clipnorm=.*use a value above 0"):
        SGD(0.1, global_clipnorm=value)
