"""SGD follows an oracle, and works in Keras."""

import keras
import numpy as np
import pytest

from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.sgd import SGD
from tests.optimizers.support import Problem, Runner, follow, one_kernel_runner
from tests.references.optimizers_reference import sgd_step


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_200_steps_follow_the_oracle(nesterov, momentum):
    def oracle(layer, grad, step, rate):
        sgd_step(layer, grad, rate, momentum, decay=0.01, nesterov=nesterov)

    optimizer = SGD(0.1, momentum, nesterov=nesterov, weight_decay=0.01)
    follow(
        Runner(optimizer, Problem(), loss_scale=2.0**15),
        lambda step: 0.1 if step < 100 else 0.01,
        oracle,
    )


@pytest.mark.parametrize(("nesterov", "expected"), [(False, (0.8, 0.42)), (True, (0.62, 0.078))])
def test_sgd_two_steps_equal_a_calculation_by_hand(nesterov, expected):
    # With lr 0.1, momentum 0.9 and g = 2 twice, plain SGD has u = 2 and 3.8. Nesterov momentum has
    # v = -0.2 and -0.38, and w += 0.9 v - 0.2.
    runner = one_kernel_runner(SGD(0.1, 0.9, nesterov=nesterov, weight_decay=0.0), [[1.0]])
    for value in expected:
        runner.step(grads=[np.array([[2.0]])])
        np.testing.assert_allclose(runner.weights()[0], [[value]], rtol=1e-6)


def test_sgd_decay_of_biases_and_normalization_needs_decay_all():
    for decay_all in (False, True):
        problem = Problem()
        runner = Runner(SGD(0.1, weight_decay=0.5, decay_all=decay_all), problem)
        runner.step(grads=[np.zeros_like(w, np.float64) for w in problem.start])
        moved = [bool(np.any(a != b)) for a, b in zip(runner.weights(), problem.start, strict=True)]
        assert moved == ([True] * 5 if decay_all else [True, False, False, True, False])


def test_sgd_in_fit_trains_a_keras_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = SGD(0.1, 0.5, weight_decay=0.0)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    y = x @ np.ones((4, 1), np.float32)
    history = model.fit(x, y, epochs=10, batch_size=16, verbose=0)
    assert history.history["loss"][-1] < 1e-3 * history.history["loss"][0]
    assert int(optimizer.iterations) == 40
    optimizer.learning_rate = 0.125
    assert optimizer.learning_rate == 0.125


def test_sgd_invalid_use_is_rejected():
    with pytest.raises(ValueError, match=r"momentum=1\.5"):
        SGD(momentum=1.5)
    optimizer = SGD()
    a, b = (keras.Variable(np.zeros(shape, np.float32)) for shape in ((2, 2), (2,)))
    with pytest.raises(ValueError, match="call build"):
        optimizer.apply([np.zeros((2, 2))])
    with pytest.raises(ValueError, match="no gradient for"):
        optimizer.apply([None, np.zeros(2)], [a, b])
    with pytest.raises(ValueError, match="in their order"):
        optimizer.apply([np.zeros(2), np.zeros((2, 2))], [b, a])
    with pytest.raises(ValueError, match="3 kinds for 2 variables"):
        optimizer.set_kinds([ParameterKind.KERNEL] * 3)
    with pytest.raises(KeyError, match="learning_rat"):
        optimizer.hyperparameters.assign({"learning_rat": 1.0})
    assert SGD.from_config(optimizer.get_config()).get_config() == optimizer.get_config()
