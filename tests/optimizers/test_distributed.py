"""Loss scaling and skipped steps, without other ranks; tests/training/test_parts_on_ranks.py has
those.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.loss_scale import LossScale
from tests.optimizers.support import scaled_sgd

START = [np.array([1.0, 2.0], np.float32)]


def test_the_scale_cancels():
    (variable,), optimizer, step = scaled_sgd(START, LossScale(1024.0))
    step(tf.constant([2.0, -4.0]))
    np.testing.assert_array_equal(variable.numpy(), [0.0, 4.0])
    assert optimizer.grad_norm.numpy() == pytest.approx(20**0.5)
    assert optimizer.iterations.numpy() == 1


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_step_that_is_not_finite_changes_nothing_but_the_scale(bad):
    (variable,), optimizer, step = scaled_sgd(START, LossScale(1024.0, dynamic=True))
    step(tf.constant([2.0, bad]))
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
    assert optimizer.iterations.numpy() == 0
    assert optimizer.loss_scale.scale.numpy() == 512.0
    assert (
        optimizer.loss_scale.skipped_steps.numpy(),
        optimizer.loss_scale.skipped_in_a_row.numpy(),
    ) == (1, 1)
    step(tf.constant([2.0, 0.0]))
    assert (
        optimizer.loss_scale.skipped_steps.numpy(),
        optimizer.loss_scale.skipped_in_a_row.numpy(),
    ) == (1, 0)
    np.testing.assert_array_equal(variable.numpy(), [0.0, 2.0])


def test_the_dynamic_scale_follows_its_rule():
    """Doubled after 3 finite steps, halved after a bad one, never below 1 or above 2^24; written
    out by hand.
    """
    scale = LossScale(4.0, dynamic=True, growth_steps=3)
    seen = []
    for finite in [1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]:
        scale.update(tf.constant(bool(finite)))
        seen.append(float(scale.scale.numpy()))
    assert seen == [4, 4, 8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]
    top = LossScale(2.0**24, dynamic=True, growth_steps=1)
    top.update(tf.constant(True))
    assert top.scale.numpy() == 2.0**24


def test_a_fixed_scale_stays():
    scale = LossScale(8.0)
    scale.update(tf.constant(False))
    assert scale.scale.numpy() == 8.0
    assert scale.skipped_steps.numpy() == 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="positive"):
        LossScale(0.0)
    _, optimizer, _ = scaled_sgd(START, None)
    with pytest.raises(ValueError, match="No variable has a gradient"):
        optimizer.apply([None])


@pytest.mark.parametrize("average", [None, 0.9])
def test_on_a_gpu_an_optimizer_of_keras_is_masked_instead_of_skipped(monkeypatch, average):
    """In one compiled program, so that no branch waits for the device; the numbers are those of the
    branch.
    """

    def run(gpu):
        monkeypatch.setattr(xla, "has_gpu", lambda: gpu)
        variables = [
            keras.Variable(np.ones(shape, np.float32), name=f"w{i}")
            for i, shape in enumerate([(3, 4), (4,)])
        ]
        kept = WeightAverage(average) if average else None
        optimizer = DistributedOptimizer(
            keras.optimizers.Adam(0.1),
            loss_scale=LossScale(8.0, dynamic=True),
            communicator=SingleProcess(),
        )
        optimizer.average = kept
        optimizer.build(variables)
        step = tf.function(
            lambda *grads: optimizer.accumulate_or_update(list(grads)), autograph=False
        )
        seen = []
        for number in range(4):
            grads = [np.full(v.shape, 8.0 * (number + 1), np.float32) for v in variables]
            if number == 2:
                grads[1][1] = np.nan
            step(*map(tf.constant, grads))
            held = [*variables, *optimizer.variables, *(kept.variables.values() if kept else ())]
            seen.append([v.numpy() for v in held])
        return seen, step.get_concrete_function(*map(tf.constant, grads)).graph

    (plain, with_branch), (masked, without) = run(False), run(True)
    assert [op.type for op in with_branch.get_operations()].count("If") == 1
    assert "If" not in {op.type for op in without.get_operations()}
    for expected, found in zip(plain, masked, strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-6)
    weights, iterations = masked[2][:2], 2
    for now, before in zip(weights, masked[1][:2], strict=True):
        np.testing.assert_array_equal(now, before)
    assert any(value.shape == () and value == iterations for value in masked[2])
