"""Divergence is detected at every step, even at steps whose values are not read.

Whole runs are tested in tests/resilience/test_diverged.py.
"""

import math
import types

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.callbacks.divergence_guard import DivergedError, DivergenceGuard
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.loss_alarm import LossAlarm, highest_loss
from hybrid_imagenet.training.loss_alarm_guard import LossAlarmGuard
from tests.support.fake_run import FakeRun, attach


def guard(read_alarm, allgather, initial_step, age_steps=0):
    """Returns a guard of a step whose alarm is what `read_alarm` returns.

    Args:
      read_alarm: Called with None for the alarm of all steps up to now.
      allgather: The `allgather` of the communicator.
      initial_step: Steps done before the session.
      age_steps: Age of the values that are read for the log.
    """
    alarm = types.SimpleNamespace(threshold=230.0, read=read_alarm)
    step = types.SimpleNamespace(alarm=alarm, telemetry=types.SimpleNamespace(age_steps=age_steps))
    communicator = types.SimpleNamespace(allgather_object=allgather)
    run = FakeRun(RunState(step=initial_step), communicator=communicator)
    run.values["alarm"] = "values for the log"
    callback = attach(LossAlarmGuard(step), run)
    callback.on_train_begin()
    return callback


def end_batch(callback, logs):
    """Ends a step."""
    callback.run.state.step += 1
    callback.on_train_batch_end(0, logs)


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
        alarm.check(values)
        alarm.advance()
    step, loss = alarm.read()
    assert step == 2
    np.testing.assert_equal(loss, mean)


def test_loss_alarm_counts_micro_batches_as_one_step():
    alarm = LossAlarm(10.0)
    for _ in range(3):
        for _ in range(2):
            alarm.check(losses(10.0, 10.0))
        alarm.advance()
    assert alarm.read() is None
    alarm.check(losses(1.0))
    alarm.check(losses(11.0))
    alarm.check(losses(1.0))
    alarm.advance()
    assert alarm.read() == (4, 11.0)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (math.nan, "is nan"),
        (7e31, r"is 7e\+31, which is above 100 times that of guesses \(230\)"),
    ],
)
def test_loss_alarm_guard_stops_all_ranks_at_the_first_bad_step_of_any(loss, text):
    alarms = [None, (7, 400.0), (4, loss)]
    watch = guard(lambda state=None: None, lambda value: alarms, initial_step=10)
    # No step was taken, so nothing is read.
    watch.check()
    with pytest.raises(
        DivergedError,
        match=rf"Training diverged at step 14: the loss {text}\. Lower the learning rate",
    ):
        end_batch(watch, {})


def test_loss_alarm_guard_gathers_once_per_step_with_logs():
    gathered = []
    alarms = [None, (2, math.nan)]
    watch = guard(lambda state=None: alarms[0], lambda value: gathered.append(value) or [value], 5)
    end_batch(watch, None)
    assert gathered == []
    end_batch(watch, {})
    watch.on_test_begin()
    watch.before_save()
    assert len(gathered) == 1
    alarms.pop(0)
    end_batch(watch, None)
    with pytest.raises(DivergedError, match="step 7: the loss is nan") as raised:
        watch.on_epoch_end(0, {})
    assert raised.value.step == 7


def test_loss_alarm_guard_before_a_checkpoint_reads_the_latest_steps():
    """Uses the delay of a GPU, where the logs of step 4 contain the values of step 2."""
    watch = guard(
        lambda state=None: None if state else (4, math.nan),
        lambda value: [value],
        initial_step=0,
        age_steps=2,
    )
    watch.run.state.step = 3
    end_batch(watch, {})
    with pytest.raises(DivergedError, match="step 4: the loss is nan"):
        watch.before_save()


def test_divergence_guard_stops_all_ranks_if_one_has_diverged():
    communicator = types.SimpleNamespace(allgather_object=lambda value: [value, [3, math.inf]])
    watch = attach(DivergenceGuard(), FakeRun(communicator=communicator))
    with pytest.raises(DivergedError, match="step 3: the mean loss is inf"):
        watch.on_epoch_end(0, {"loss": 1.0})


def test_divergence_guard_checks_the_mean_loss_of_the_epoch():
    watch = attach(DivergenceGuard(), FakeRun(RunState(step=1)))
    watch.on_train_batch_end(0, {"loss": math.nan})
    watch.on_epoch_end(0, {"loss": 1.0})
    with pytest.raises(DivergedError, match="step 1: the mean loss is nan") as caught:
        watch.on_epoch_end(1, {"loss": math.nan})
    # A script has none of the flags of the program.
    assert " --" not in str(caught.value)
    assert caught.value.exit_code == 3
