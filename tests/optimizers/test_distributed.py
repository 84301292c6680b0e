"""Loss scaling and skipped steps on one rank; tests/callbacks/test_on_ranks.py tests several."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.loss_scale import LossScale, many_skipped_steps
from tests.optimizers.support import scaled_sgd

START = [np.array([1.0, 2.0], np.float32)]


def test_loss_scale_does_not_change_the_update():
    (variable,), optimizer, step = scaled_sgd(START, LossScale(1024.0))
    step(tf.constant([2.0, -4.0]))
    np.testing.assert_array_equal(variable.numpy(), [0.0, 4.0])
    assert optimizer.grad_norm.numpy() == pytest.approx(20**0.5)
    assert optimizer.iterations.numpy() == 1


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_step_with_a_non_finite_gradient_changes_only_the_loss_scale(bad):
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


def test_dynamic_loss_scale_grows_and_shrinks_within_its_limits():
    """The scale doubles after 3 finite steps and halves after a bad one.

    It is never below 2^-24 or above 2^24. The values are calculated by hand.
    """
    scale = LossScale(4.0, dynamic=True, growth_steps=3)
    scales = []
    for finite in [1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]:
        scale.update(tf.constant(bool(finite)))
        scales.append(float(scale.scale.numpy()))
    assert scales == [4, 4, 8, 8, 4, 4, 4, 8, 4, 2, 1, 0.5, 0.25]
    top = LossScale(2.0**24, dynamic=True, growth_steps=1)
    top.update(tf.constant(True))
    assert top.scale.numpy() == 2.0**24
    bottom = LossScale(2.0**-24, dynamic=True)
    bottom.update(tf.constant(False))
    assert bottom.scale.numpy() == 2.0**-24


@pytest.mark.parametrize(
    ("skipped", "steps", "is_reported"),
    [(16, 20, False), (17, 339, True), (17, 340, False), (50, 200, True), (100, 10_000, False)],
)
def test_many_skipped_steps_reports_more_than_a_dynamic_scale_needs(skipped, steps, is_reported):
    warning = many_skipped_steps(skipped, steps)
    assert (warning is not None) == is_reported
    if warning:
        assert warning.startswith(f"{skipped} of {steps} steps were skipped, because")


def test_fixed_loss_scale_counts_skipped_steps_but_does_not_change():
    scale = LossScale(8.0)
    scale.update(tf.constant(False))
    assert scale.scale.numpy() == 8.0
    assert scale.skipped_steps.numpy() == 1


def test_loss_scale_of_zero_and_apply_without_gradients_are_rejected():
    with pytest.raises(ValueError, match="positive"):
        LossScale(0.0)
    _, optimizer, _ = scaled_sgd(START, None)
    with pytest.raises(ValueError, match="No variable has a gradient"):
        optimizer.apply([None])


@pytest.mark.parametrize("average", [None, 0.9])
def test_keras_optimizer_on_a_gpu_masks_a_skipped_step_without_a_branch(monkeypatch, average):
    """Compares with the step that has a branch, which would make the device wait on a GPU."""

    def run(gpu):
        monkeypatch.setattr(xla, "has_gpu", lambda: gpu)
        variables = [
            keras.Variable(np.ones(shape, np.float32), name=f"w{i}")
            for i, shape in enumerate([(3, 4), (4,)])
        ]
        weight_average = WeightAverage(average) if average else None
        optimizer = DistributedOptimizer(
            keras.optimizers.Adam(0.1),
            loss_scale=LossScale(8.0, dynamic=True),
            communicator=SingleProcess(),
        )
        optimizer.average = weight_average
        optimizer.build(variables)
        step = tf.function(
            lambda *grads: optimizer.accumulate_or_update(list(grads)), autograph=False
        )
        values = []
        for number in range(4):
            grads = [np.full(v.shape, 8.0 * (number + 1), np.float32) for v in variables]
            if number == 2:
                grads[1][1] = np.nan
            step(*map(tf.constant, grads))
            averages = weight_average.variables if weight_average else ()
            state = [*variables, *optimizer.variables, *averages]
            values.append([v.numpy() for v in state])
        return values, step.get_concrete_function(*map(tf.constant, grads)).graph

    plain, with_branch = run(False)
    masked, without = run(True)
    assert [op.type for op in with_branch.get_operations()].count("If") == 1
    assert "If" not in {op.type for op in without.get_operations()}
    for expected, actual in zip(plain, masked, strict=True):
        for a, b in zip(expected, actual, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-6)
    # The third step was skipped: its weights are those after the second, and so is the counter.
    for after, before in zip(masked[2][:2], masked[1][:2], strict=True):
        np.testing.assert_array_equal(after, before)
    assert any(value.shape == () and value == 2 for value in masked[2])
