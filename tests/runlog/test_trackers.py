"""Sinks that a run can do without: full disks and servers that are away end no training."""

import resource

import pytest
import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import trackers


class Sink:
    """Takes two step records, then its disk is full."""

    def __init__(self):
        self.calls = []

    def step(self, record):
        self.calls.append(record["step"])
        if len(self.calls) > 2:
            raise tf.errors.ResourceExhaustedError(None, None, "events.v2; No space left on device\n[Op:FlushWriter]")

    def run_finished(self, summary=None):
        self.calls.append("finished")


def test_a_sink_that_fails_is_told_once_and_left_out():
    told, sink = [], Sink()
    view = trackers.Optional("TensorBoard", lambda: sink, told.append)
    for step in range(1, 6):
        view.step({"step": step})
    view.run_finished()
    assert sink.calls == [1, 2, 3]
    [line] = told
    expected = "TensorBoard receives nothing more of this run, which continues: events.v2; No space left on device"
    assert line.startswith(expected)
    assert "\n" not in line


def test_a_sink_that_cannot_be_made_is_told_and_a_mistake_of_the_user_ends_the_run():
    told = []

    def make():
        raise ConnectionError("tracker.example: no route to host")

    view = trackers.Optional("wandb", make, told.append)
    view.epoch({"step": 1})
    assert len(told) == 1 and "wandb" in told[0] and "no route to host" in told[0]
    with pytest.raises(UserError, match="not installed"):
        trackers.Optional("none_such", lambda: trackers.Tracker("none_such", "run", {}), told.append)


def test_tensorboard_on_a_full_disk_for_real(tmp_path):
    """A limit on the size of files stands in for the disk, as the file system's answer is the same kind of error."""
    told = []
    view = trackers.Optional("TensorBoard", lambda: trackers.TensorBoard(str(tmp_path)), told.append)
    view.step({"kind": "step", "step": 1, "train_loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for step in range(2, 300):
            view.step({"kind": "step", "step": step, "train_loss": 1.0})
        view.run_finished()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(told) == 1
    assert "TensorBoard receives nothing more" in told[0]
