"""What the loop hands to callbacks, and when."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.numerics.run_length import RunLength
from hybrid_imagenet.numerics.sampling import SampleOrder
from hybrid_imagenet.resilience.preemption import Control
from hybrid_imagenet.training.accumulators import ClassificationSums, SumAccumulator
from hybrid_imagenet.training.late_copies import LateCopies
from hybrid_imagenet.training.loop import Loop

EXAMPLES, BATCH = 6, 2


class Step:
    """Counts each image with a loss of 1 nat in the first epoch, 2 in the second."""

    def __init__(self, lag=0):
        self.sums = SumAccumulator("sums")
        self.copies = LateCopies({"sums": self.sums.variable}, lag)
        self.done = 0

    def requests(self):
        return self.control.numpy()

    def single(self, batch, control):
        loss = float(1 + self.done // (EXAMPLES // BATCH))
        self.done += 1
        self.sums.variable.assign_add([BATCH * loss, 0.0, 0.0, float(BATCH)])
        self.control = control


class Notes(keras.callbacks.Callback):
    """What each end of an epoch shows."""

    def __init__(self, step):
        super().__init__()
        self.step, self.epochs = step, []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((logs["sums"], self.step.sums.read()))


def run_loop(step, callback, log_every, *, state=None, examples=EXAMPLES, epochs=2, batch=(BATCH, 1), data=None):
    """Trains without validation on the micro-batches of a list, zeros if there is none."""
    data = data or [{"image": tf.zeros([BATCH])}] * 100
    state = state or RunState()
    Loop(
        state=state,
        step=step,
        length=RunLength(SampleOrder(examples, 0, "wrap"), epochs),
        batches=lambda epoch: batch,
        data=lambda cursor, step: iter(data),
        validate=dict,
        validate_after=lambda position: False,
        control=Control(),
        world_size=1,
        log_every=log_every,
        callbacks=[callback],
    ).run()
    return state


def test_what_is_saved_at_the_end_of_an_epoch_begins_the_next_one():
    step = Step()
    notes = Notes(step)
    run_loop(step, notes, log_every=1)
    empty = ClassificationSums(0.0, 0.0, 0.0, 0.0)
    assert notes.epochs == [
        (ClassificationSums(6.0, 0.0, 0.0, 6.0), empty),
        (ClassificationSums(12.0, 0.0, 0.0, 6.0), empty),
    ]


@pytest.mark.parametrize(("lag", "log_every", "told"), [(0, 3, [1.0, 2.0]), (2, 3, [1.0, 2.0]), (2, 4, [2.0])])
def test_a_record_is_complete_whether_or_not_it_tells_of_two_steps_before(lag, log_every, told):
    """With four steps between records the copy of two steps before belongs to the epoch before: it is not used."""
    records = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: records.append((step, logs)))
    run_loop(Step(lag), keep, log_every)
    found = [(step, logs) for step, logs in records if "train_loss" in logs]
    assert [logs["train_loss"] for _, logs in found] == told
    assert (
        [step for step, _ in found]
        == [logs["step"] for _, logs in found]
        == [log_every * n for n in (1, 2)][: len(told)]
    )


def test_a_request_of_any_rank_ends_the_step_at_which_it_was_made():
    step, seen = Step(), []
    step.requests = lambda: np.array([int(step.done == 2), 0])
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda number, logs: seen.append(number))
    assert run_loop(step, keep, log_every=20).stop == "preempted"
    assert seen == [1, 2]


def test_the_first_record_of_a_session_tells_how_long_its_step_was_compiled():
    step, records = Step(), []
    single = step.single

    def compiled(batch, control):
        if not step.done:
            time.sleep(0.2)
        return single(batch, control)

    step.single = compiled
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: records.append(logs))
    run_loop(step, keep, log_every=20)
    assert 0.2 <= records[0]["train_start_seconds"] <= records[0]["train_seconds"]
    assert "train_start_seconds" not in records[1]
