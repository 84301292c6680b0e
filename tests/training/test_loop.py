"""What the loop says, and when."""

import time
import types

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import config
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.schedules.run_length import RunLength
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


class Told:
    """Keeps what the loop says to its trainer, as which it stands; nothing is validated."""

    def __init__(self):
        self.steps, self.epochs, self.ended = [], [], 0

    def step_begins(self, start, end, global_batch):
        self.begun = start, end, global_batch

    def step_ends(self, position, record, save):
        self.steps.append(record)

    def validates(self, position):
        return False

    def epoch_ends(self, epoch, record):
        self.epochs.append(record)

    def loop_ends(self):
        self.ended += 1


def run_loop(step, told, log_every):
    """Trains two epochs without validation, on zeros."""
    order, state = SampleOrder(EXAMPLES, 0, "wrap"), RunState()
    data = types.SimpleNamespace(
        order=order,
        length=RunLength(order, 2),
        sizes=lambda epoch: (BATCH, 1),
        global_batch=lambda epoch: BATCH,
        stream=lambda cursor, step: iter([{"image": tf.zeros([BATCH])}] * 100),
    )
    told.parts = types.SimpleNamespace(
        state=state,
        step=step,
        data=data,
        communicator=SingleProcess(),
        config=config.resolve([f"--log_every_steps={log_every}"]),
    )
    Loop(told).run()
    assert told.ended == 1
    return state


def test_what_is_saved_at_the_end_of_an_epoch_begins_the_next_one():
    step, found = Step(), []
    told = Told()
    told.epoch_ends = lambda epoch, record: found.append((record["sums"], step.sums.read()))
    run_loop(step, told, log_every=1)
    empty = ClassificationSums(0.0, 0.0, 0.0, 0.0)
    assert found == [
        (ClassificationSums(6.0, 0.0, 0.0, 6.0), empty),
        (ClassificationSums(12.0, 0.0, 0.0, 6.0), empty),
    ]


@pytest.mark.parametrize(
    ("lag", "log_every", "losses"), [(0, 3, [1.0, 2.0]), (2, 3, [1.0, 2.0]), (2, 4, [2.0])]
)
def test_a_record_is_complete_whether_or_not_it_tells_of_two_steps_before(lag, log_every, losses):
    """With four steps between records the copy of two steps before belongs to the epoch before: it
    is not used.
    """
    told = Told()
    run_loop(Step(lag), told, log_every)
    found = [(step, record) for step, record in enumerate(told.steps, 1) if record is not None]
    assert [record["train_loss"] for _, record in found] == losses
    assert (
        [step for step, _ in found]
        == [record["step"] for _, record in found]
        == [log_every * n for n in (1, 2)][: len(losses)]
    )


def test_a_request_of_any_rank_ends_the_step_at_which_it_was_made():
    step, told = Step(), Told()
    step.requests = lambda: np.array([int(step.done == 2), 0])
    assert run_loop(step, told, log_every=20).stop == "preempted"
    assert len(told.steps) == 2


@pytest.mark.parametrize("log_every", [1, 20])
def test_the_first_record_of_a_session_tells_how_long_its_step_was_compiled(log_every):
    step, told = Step(), Told()
    single = step.single

    def compiled(batch, control):
        if not step.done:
            time.sleep(0.2)
        return single(batch, control)

    step.single = compiled
    run_loop(step, told, log_every)
    records = told.epochs
    assert 0.2 <= records[0]["train_start_seconds"] <= records[0]["train_seconds"]
    assert "train_start_seconds" not in records[1]
    if log_every == 1:  # the time of the first step is that of its compilation, not a speed
        assert "images_per_second" not in told.steps[0] and "step_seconds" not in told.steps[0]
        assert told.steps[1]["images_per_second"] > BATCH / 0.2
