"""Divergence is judged at every step, also where nothing is fetched: in the first steps, and in runs of a few."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.training import loss_alarm
from hybrid_imagenet.training.divergence import DivergedError, DivergenceGuard
from hybrid_imagenet.training.loss_alarm import LossAlarm
from hybrid_imagenet.training.step import TrainStep
from tests.training.test_loop import Events, run_loop

CLASSES, BATCH, EXAMPLES = 5, 4, 16
HIGHEST = 100 * math.log(CLASSES)


def losses(*values):
    return tf.constant(values, tf.float32)


def test_the_limit_is_a_hundred_times_the_loss_of_guessing():
    assert loss_alarm.limit(1000) == pytest.approx(690.7755, abs=1e-3)
    assert loss_alarm.limit(1) == loss_alarm.limit(2) > 0


@pytest.mark.parametrize(("bad", "mean"), [(math.nan, math.nan), (math.inf, math.inf), (20.0, 10.5)])
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


def train_step(lr):
    keras.utils.set_random_seed(1)
    image, ranks = keras.Input((6,)), SingleProcess()
    model = keras.Model(image, keras.layers.Dense(CLASSES, dtype="float32")(image))
    optimizer = DistributedOptimizer(optimizers.create("sgd", learning_rate=lr), ranks)
    return TrainStep(model, optimizer, lambda batch: batch["image"], ranks)


def run(lr, *, epochs, micro_batches=1, log_every=20):
    """Trains one layer on noise for some epochs of four steps; returns the state, and where metrics were fetched."""
    ranks, state, step = SingleProcess(), RunState(), train_step(lr)
    generator = np.random.default_rng(1)
    share = BATCH // micro_batches
    batches = [
        {
            "image": tf.constant(generator.normal(size=(share, 6)), tf.float32),
            "label": tf.constant(generator.integers(0, CLASSES, share), tf.int32),
        }
        for _ in range(200)
    ]
    copies = step.copies

    def alarm():
        return step.alarm.read(copies.read("alarm"))

    guard = DivergenceGuard(state, alarm, ranks.allgather_object, step.alarm.highest, lambda: copies.behind)
    batch = share, micro_batches
    events = Events()
    events.step_ends = lambda position, record, save: record and guard.look()
    events.epoch_ends = lambda epoch, record: guard.look()
    run_loop(step, events, log_every, state=state, examples=EXAMPLES, epochs=epochs, batch=batch, data=batches)
    return state


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_run_of_a_few_steps_that_diverges_is_no_success(micro_batches):
    """It ended with loss 7e31 and exit code 0; metrics are fetched every 20 steps."""
    with pytest.raises(DivergedError, match=r"^step 2: the loss is .*, above 100 ln\(classes\) = 160.9") as raised:
        run(1e6, epochs=1, micro_batches=micro_batches)
    assert raised.value.exit_code == 3
    assert raised.value.loss > HIGHEST
    with pytest.raises(DivergedError, match=r"^step 2: the loss is .*"):
        run(1e6, epochs=9, log_every=3)


def test_a_run_that_learns_is_left_alone():
    assert run(0.1, epochs=5).step == 20


def test_the_control_word_does_not_wait_for_the_judgement():
    """What the host reads of a step depends on no loss, so that it can issue the next steps meanwhile."""
    batch = {"image": tf.TensorSpec([4, 6]), "label": tf.TensorSpec([4], tf.int32)}
    graph = train_step(0.1).single.get_concrete_function(batch, tf.TensorSpec([3], tf.int32, "control")).graph
    assert "IsFinite" in (kinds := {op.type for op in graph.get_operations()})
    assert "LessEqual" in kinds
    assert not graph.outputs
    (kept,) = [
        op
        for op in graph.get_operations()
        if op.type == "AssignVariableOp" and op.inputs[1].op.name == "control" and "CPU" in op.device
    ]
    assert not kept.control_inputs
