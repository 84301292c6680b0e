"""Tests of `hybrid_imagenet.runlog.tensorboard`."""

import resource

import pytest
import tensorflow as tf

from hybrid_imagenet.runlog import tensorboard

STEP = {
    "kind": "step",
    "epoch": 1,
    "step": 5,
    "train_loss": 1.0,
    "learning_rate": 0.1,
    "upper_bound": None,
    "trust_ratios": {"conv1": 0.01, "fc": None},
}
EPOCH = {
    "kind": "epoch",
    "epoch": 1,
    "step": 10,
    "train_loss": 0.9,
    "val_top1": 0.5,
    "val_top5": 0.6,
    "val_loss": 1.1,
}


def test_log_on_a_full_disk_prints_one_message(tmp_path):
    # A limit on the size of files replaces the full disk, because it causes the same kind of error.
    messages = []
    board = tensorboard.TensorBoard(str(tmp_path), messages.append)
    board.log(STEP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for step in range(6, 300):
            board.log(STEP | {"step": step})
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (line,) = messages
    assert line.startswith("TensorBoard events can no longer be written: ")


def events(directory):
    from tensorflow.core.util import event_pb2

    rows = []
    for item in tf.data.TFRecordDataset(sorted(map(str, directory.iterdir()))).as_numpy_iterator():
        event = event_pb2.Event.FromString(item)
        # TensorBoard does the same.
        if event.session_log.status == event.session_log.START:
            rows = [value for value in rows if value[0] < event.step]
        rows += [
            (
                event.step,
                value.tag,
                tf.make_ndarray(value.tensor),
                value.metadata.plugin_data.plugin_name,
            )
            for value in event.summary.value
        ]
    return rows


def test_log_writes_scalars_under_documented_tags(tmp_path):
    board = tensorboard.TensorBoard(str(tmp_path / "tb"), print)
    board.log(STEP)
    board.log(EPOCH)
    board.close()
    rows = events(tmp_path / "tb")
    scalars = {(s, tag): float(v) for s, tag, v, plugin in rows if plugin == "scalars"}
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


def test_hide_events_from_hides_events_of_repeated_steps(tmp_path):
    folder = tmp_path / "tb"
    board = tensorboard.TensorBoard(str(folder), print)
    # The run has no events yet.
    board.hide_events_from(0)
    board.log(STEP)
    board.log(EPOCH)
    board.close()
    (first,) = folder.iterdir()
    # The earlier session was long ago.
    first.rename(folder / "events.out.tfevents.0000000001.host")
    board = tensorboard.TensorBoard(str(folder), print)
    board.hide_events_from(5)
    board.log(STEP)
    board.log(EPOCH)
    board.close()
    steps = [step for step, tag, *_ in events(folder) if tag in ("train/loss", "epoch/train/loss")]
    assert steps == [5, 10]
