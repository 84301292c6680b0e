"""Sinks that a run can do without: full disks and servers that are away end no training."""

import io
import re
import resource

import pytest
import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import live, trackers

STEP = {"kind": "step", "epoch": 1, "step": 5, "train_loss": 1.0, "learning_rate": 0.1, "upper_bound": None,
        "trust_ratios": {"conv1": 0.01, "fc": None}}  # fmt: skip
EPOCH = {"kind": "epoch", "epoch": 1, "step": 10, "train_loss": 0.9, "val_top1": 0.5, "val_top5": 0.6, "val_loss": 1.1}


class Sink:
    """Takes some records, then its disk is full."""

    def __init__(self, room=2):
        self.calls, self.room = [], room

    def log(self, values, step):
        self.calls.append(step)
        if len(self.calls) > self.room:
            raise tf.errors.ResourceExhaustedError(None, None, "events.v2; No space left on device\n[Op:FlushWriter]")

    def close(self):
        self.calls.append("closed")


def step_record(step):
    return {"kind": "step", "step": step, "epoch": 1, "train_loss": 1.0}


@pytest.fixture
def shown():
    """A stream with a view that shows messages alone."""
    stream = io.StringIO()
    return stream, live.make_view("none", stream, 2)


def test_a_sink_that_fails_is_told_once_and_left_out(shown):
    stream, view = shown
    failing, other = Sink(), Sink(room=9)
    view = trackers.WithSinks(view, {"TensorBoard": lambda: failing, "wandb": lambda: other})
    for step in range(1, 6):
        view.step(step_record(step))
    view.run_finished()
    assert failing.calls == [1, 2, 3]
    assert other.calls == [1, 2, 3, 4, 5, "closed"]
    [line] = stream.getvalue().splitlines()
    assert "TensorBoard receives nothing more" in line and "No space left on device" in line


def test_a_sink_that_cannot_be_made_is_told_and_a_mistake_of_the_user_ends_the_run(shown):
    stream, view = shown

    def make():
        raise ConnectionError("tracker.example: no route to host")

    def unusable():
        raise UserError("not installed")

    trackers.WithSinks(view, {"wandb": make}).step(step_record(1))
    [line] = stream.getvalue().splitlines()
    assert "wandb" in line and "no route to host" in line
    with pytest.raises(UserError, match="not installed"):
        trackers.WithSinks(view, {"none_such": unusable})


def test_tensorboard_on_a_full_disk_for_real(tmp_path, shown):
    """A limit on the size of files stands in for the disk, as the file system's answer is the same kind of error."""
    stream, view = shown
    view = trackers.WithSinks(view, {"TensorBoard": lambda: trackers.TensorBoard(str(tmp_path))})
    view.step(step_record(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for step in range(2, 300):
            view.step(step_record(step))
        view.run_finished()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stream.getvalue().count("TensorBoard receives nothing more") == 1


def test_the_view_shows_the_same_beside_sinks():
    texts = []
    for makers in ({}, {"wandb": lambda: Sink(room=9)}):
        stream = io.StringIO()
        view = trackers.WithSinks(live.make_view("plain", stream, 2), makers)
        view.run_started({"world_size": 1})
        view.advance(1, 0.1)
        view.step(step_record(5))
        view.epoch(step_record(10) | {"kind": "epoch", "val_top1": 0.5})
        view.message("remark", 1)
        view.run_finished()
        texts.append(stream.getvalue())
    assert texts[0] == texts[1]
    assert re.search(r" 0\.\d+/2 .*\n +1/2 (.*\n)+rank 1: remark", texts[0])


def events(directory):
    from tensorflow.core.util import event_pb2

    (path,) = directory.iterdir()
    found = []
    for item in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = event_pb2.Event.FromString(item)
        found += [(event.step, value.tag, tf.make_ndarray(value.tensor), value.metadata.plugin_data.plugin_name)
                  for value in event.summary.value]  # fmt: skip
    return found


def test_tensorboard_files_hold_scalars_under_documented_tags(tmp_path):
    board = trackers.TensorBoard(str(tmp_path / "tb"))
    board.log(trackers.scalars(STEP), STEP["step"])
    board.log(trackers.scalars(EPOCH), EPOCH["step"])
    board.close()
    found = events(tmp_path / "tb")
    scalars = {(s, tag): float(v) for s, tag, v, plugin in found if plugin == "scalars"}
    assert scalars == {
        (5, "train/loss"): 1.0,
        (5, "optimizer/learning_rate"): pytest.approx(0.1),
        (5, "trust_ratio/conv1"): pytest.approx(0.01),
        (5, "learning_rate/conv1"): pytest.approx(0.001),
        (10, "epoch/train/loss"): pytest.approx(0.9),
        (10, "validation/loss"): pytest.approx(1.1),
        (10, "validation/top1"): 0.5,
        (10, "validation/top5"): pytest.approx(0.6),
    }
