"""TensorBoard's events: their tags, and that a full disk ends no training."""

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


def test_on_a_full_disk_training_continues_and_one_line_says_so(tmp_path):
    """A limit on the size of files stands in for the disk, as the file system's answer is the same
    kind of error.
    """
    told = []
    board = tensorboard.TensorBoard(str(tmp_path), told.append)
    board.log(STEP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for step in range(6, 300):
            board.log(STEP | {"step": step})
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (line,) = told
    assert line.startswith("TensorBoard receives nothing more of this run, which continues: ")


def events(directory):
    from tensorflow.core.util import event_pb2

    found = []
    for item in tf.data.TFRecordDataset(sorted(map(str, directory.iterdir()))).as_numpy_iterator():
        event = event_pb2.Event.FromString(item)
        if event.session_log.status == event.session_log.START:  # as TensorBoard does
            found = [value for value in found if value[0] < event.step]
        found += [
            (
                event.step,
                value.tag,
                tf.make_ndarray(value.tensor),
                value.metadata.plugin_data.plugin_name,
            )
            for value in event.summary.value
        ]
    return found


def test_files_hold_scalars_under_documented_tags(tmp_path):
    board = tensorboard.TensorBoard(str(tmp_path / "tb"), print)
    board.log(STEP)
    board.log(EPOCH)
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


def test_events_that_a_kill_undid_are_left_out_after_a_resume(tmp_path):
    folder = tmp_path / "tb"
    board = tensorboard.TensorBoard(str(folder), print)
    board.resumed(0)  # of a run without events yet
    board.log(STEP)
    board.log(EPOCH)
    board.close()
    (first,) = folder.iterdir()
    first.rename(folder / "events.out.tfevents.0000000001.host")  # of a second long ago
    board = tensorboard.TensorBoard(str(folder), print)
    board.resumed(5)
    board.log(STEP)
    board.log(EPOCH)
    board.close()
    steps = [step for step, tag, *_ in events(folder) if tag in ("train/loss", "epoch/train/loss")]
    assert steps == [5, 10]
