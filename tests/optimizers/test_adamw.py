"""AdamW follows an oracle and Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.optimizers.adamw import AdamW
from tests.optimizers.support import Problem, Runner, follow
from tests.references.optimizers_reference import adamw_step


@pytest.mark.parametrize(
    ("arguments", "loss_scale"), [({}, 1.0), ({"beta1": 0.8, "beta2": 0.99, "eps": 1e-3}, 2.0**15)]
)
def test_adamw_200_steps_follow_the_oracle(arguments, loss_scale):
    def oracle(layer, grad, step, rate):
        adamw_step(layer, grad, step + 1, rate, decay=0.1, **arguments)

    runner = Runner(AdamW(0.02, weight_decay=0.1, **arguments), Problem(), loss_scale)
    follow(runner, lambda step: 0.02 * (1 - step / 200), oracle)


def test_adamw_200_steps_with_decay_of_all_equal_those_of_keras():
    problem = Problem()
    ours = Runner(AdamW(0.02, weight_decay=0.1, decay_all=True), problem)
    variables = problem.variables()
    keras_adamw = keras.optimizers.AdamW(0.02, weight_decay=0.1)
    keras_adamw.build(variables)
    apply = tf.function(keras_adamw.apply, autograph=False)
    for step in range(200):
        ours.step()
        grads = problem.grads([v.numpy() for v in variables], step)
        apply([tf.constant(g, tf.float32) for g in grads])
    for value, variable in zip(ours.weights(), variables, strict=True):
        np.testing.assert_allclose(value, variable.numpy(), rtol=1e-4, atol=1e-5)


def test_adamw_without_arguments_has_the_constants_of_keras():
    ours = AdamW().get_config()
    theirs = keras.optimizers.AdamW().get_config()
    assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"])
    assert ours["weight_decay"] == theirs["weight_decay"]
    assert [ours[name] for name in ("beta1", "beta2", "eps")] == [
        theirs[name] for name in ("beta_1", "beta_2", "epsilon")
    ]
