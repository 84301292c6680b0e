"""Divergence is detected at every step, also at steps whose values are not read.

Whole runs are tested in tests/resilience/test_diverged.py.
"""

import math
import types

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.callbacks.divergence_guard import DivergedError, DivergenceGuard
from hybrid_imagenet.training.loss_alarm import LossAlarm, highest_loss


def guard(alarms, allgather, initial_step):
    """Returns a guard that reads the current first element of `alarms`."""
    communicator = types.SimpleNamespace(allgather_object=allgather)
    callback = DivergenceGuard(lambda: alarms[0], highest_loss=230.0, communicator=communicator)
    callback.set_params({"initial_step": initial_step})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


def losses(*values):
    return tf.constant(values, tf.float32)


def test_highest_loss_is_a_hundred_times_the_loss_of_guessing():
    assert highest_loss(1000) == pytest.approx(690.7755, abs=1e-3)
    assert highest_loss(1) == highest_loss(2) > 0
    # The summed loss adds a binary loss for each class.
    assert highest_loss(1000, summed=True) == pytest.approx(69314.718, abs=1e-3)


@pytest.mark.parametrize(
    ("bad", "mean"), [(math.nan, math.nan), (math.inf, math.inf), (20.0, 10.5)]
)
def test_loss_alarm_keeps_the_first_bad_step(bad, mean):
    alarm = LossAlarm(10.0)
    for values in (losses(9.0, 11.0), losses(1.0, bad), losses(math.nan, 1.0)):
        alarm.judge(values)
        alarm.advance()
    step, loss = alarm.read()
    assert step == 2
    np.testing.assert_equal(loss, mean)


def test_loss_alarm_counts_micro_batches_as_one_step():
    alarm = LossAlarm(10.0)
    for _ in range(3):
        for _ in range(2):
            alarm.judge(losses(10.0, 10.0))
        alarm.advance()
    assert alarm.read() is None
    alarm.judge(losses(1.0))
    alarm.judge(losses(11.0))
    alarm.judge(losses(1.0))
    alarm.advance()
    assert alarm.read() == (4, 11.0)


@pytest.mark.parametrize(
    ("loss", "why"), [(math.nan, "not finite"), (7e31, "above 100 times that of guesses, 230")]
)
def test_divergence_guard_stops_all_ranks_at_the_first_bad_step_of_any(loss, why):
    alarms = [None, (7, 400.0), (4, loss)]
    watch = guard(alarms, lambda value: alarms, initial_step=10)
    # No step was taken, so nothing is read.
    watch.check()
    with pytest.raises(
        DivergedError,
        match=f"step 14: the loss is .*, {why}: training has diverged; lower the learning",
    ):
        watch.on_train_batch_end(8, {})


def test_divergence_guard_gathers_once_per_step_with_logs():
    gathered = []
    alarms = [None, (2, math.nan)]
    watch = guard(alarms, lambda value: gathered.append(value) or [value], initial_step=5)
    watch.on_train_batch_end(1, None)
    assert gathered == []
    watch.on_train_batch_end(2, {})
    watch.on_test_begin()
    watch.before_save()
    assert len(gathered) == 1
    alarms.pop(0)
    watch.on_train_batch_end(3, None)
    with pytest.raises(DivergedError, match="step 7: the loss is nan, not finite") as raised:
        watch.on_epoch_end(0, {})
    assert raised.value.step == 7


def test_divergence_guard_before_a_checkpoint_reads_the_latest_steps():
    """Uses a lag as on a GPU, where the logs of step 4 contain the values of step 2."""
    communicator = types.SimpleNamespace(allgather_object=lambda value: [value])
    watch = DivergenceGuard(
        lambda: None,
        read_alarm_now=lambda: (4, math.nan),
        lag=lambda: 2,
        communicator=communicator,
    )
    watch.set_params({})
    watch.on_train_begin()
    watch.on_epoch_begin(0)
    watch.on_train_batch_end(3, {})
    with pytest.raises(DivergedError, match="step 4: the loss is nan, not finite"):
        watch.before_save()


def test_divergence_guard_without_alarm_stops_all_ranks_if_one_has_diverged():
    communicator = types.SimpleNamespace(allgather_object=lambda value: [value, [3, math.inf]])
    watch = DivergenceGuard(communicator=communicator)
    watch.set_params({})
    watch.on_train_begin()
    with pytest.raises(DivergedError, match="step 3: the mean loss is inf, not finite"):
        watch.on_epoch_end(0, {"loss": 1.0})


def test_divergence_guard_without_alarm_checks_the_mean_loss_of_the_epoch():
    watch = DivergenceGuard()
    watch.set_params({})
    watch.on_train_begin()
    watch.on_epoch_begin(0)
    watch.on_train_batch_end(0, {"loss": math.nan})
    watch.on_epoch_end(0, {"loss": 1.0})
    with pytest.raises(DivergedError, match="step 1: the mean loss is nan, not finite") as caught:
        watch.on_epoch_end(1, {"loss": math.nan})
    # A script has none of the flags of the program.
    assert " --" not in str(caught.value)
    assert caught.value.exit_code == 3
