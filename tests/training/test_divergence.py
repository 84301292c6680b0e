"""Divergence is judged at every step, also where nothing is fetched. Whole runs:
tests/resilience/test_diverged.py.
"""

import math
import types

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.divergence import (
    DivergedError,
    DivergenceGuard,
    LossAlarm,
    highest_loss,
)


def guard(state, alarms, allgather):
    """Looks at the first of `alarms`, whatever it is at that moment."""
    alarm = types.SimpleNamespace(read=lambda values: alarms[0], highest=230.0)
    copies = types.SimpleNamespace(read=lambda name: None, behind=0)
    return DivergenceGuard(state, alarm, copies, allgather)


def losses(*values):
    return tf.constant(values, tf.float32)


def test_the_limit_is_a_hundred_times_the_loss_of_guessing():
    assert highest_loss(1000) == pytest.approx(690.7755, abs=1e-3)
    assert highest_loss(1) == highest_loss(2) > 0
    assert highest_loss(1000, summed=True) == pytest.approx(
        69314.718, abs=1e-3
    )  # of a binary loss for each class


@pytest.mark.parametrize(
    ("bad", "mean"), [(math.nan, math.nan), (math.inf, math.inf), (20.0, 10.5)]
)
def test_the_first_bad_step_is_kept(bad, mean):
    alarm = LossAlarm(10.0)
    for values in (losses(9.0, 11.0), losses(1.0, bad), losses(math.nan, 1.0)):
        alarm.judge(values)
        alarm.advance()
    step, loss = alarm.read()
    assert step == 2
    np.testing.assert_equal(loss, mean)


def test_good_steps_raise_no_alarm_and_micro_batches_count_as_one_step():
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
def test_the_alarm_of_any_rank_ends_all_at_the_step_that_went_wrong(loss, why):
    state, alarms = RunState(step=10), [None, (7, 400.0), (4, loss)]
    watch = guard(state, alarms, lambda own: alarms)
    watch.look()  # no step was done
    state.step = 19
    with pytest.raises(
        DivergedError,
        match=f"step 14: the loss is .*, {why}: training has diverged; lower the learning",
    ):
        watch.look()


def test_a_step_is_looked_at_once():
    state, asked = RunState(step=5), []
    alarms = [None, (2, math.nan)]
    watch = guard(state, alarms, lambda own: asked.append(own) or [own])
    watch.look()
    assert asked == []
    state.step = 8
    watch.look()
    watch.look()
    assert len(asked) == 1
    state.step = 9
    alarms.pop(0)
    with pytest.raises(DivergedError, match="step 7: the loss is nan, not finite") as raised:
        watch.look()
    assert raised.value.step == 7
