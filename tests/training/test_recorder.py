"""Records of a run whose files were damaged between two sessions."""

import json
import shlex

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.sampling import Cursor
from hybrid_imagenet.runlog import jsonl
from hybrid_imagenet.tools import evaluate
from hybrid_imagenet.training import closing
from hybrid_imagenet.training.recorder import Recording

FACTS = {"train_images": 100, "validation_images": 10, "world_size": 1, "precision": "float32"}


@pytest.fixture
def session(tmp_path, capsys):
    """One session of a run up to an epoch: its records are written as the loop does."""

    def session(start, stop, best=0.7, best_epoch=2):
        flags = [f"--run_dir={tmp_path / 'run'}", "--epochs=9", "--warmup_epochs=0", "--target=0.6"]
        recording = Recording(config.resolve([*flags, *(["--resume"] if start else [])]), 0, 1)
        state = RunState(
            Cursor(start, 0), 10 * start, finished_epochs=start, closed_at=float(start), seconds=5.0 * start
        )
        state.best_top1, state.best_epoch = (best, best_epoch) if start else (0.0, 0)
        recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, state)
        for epoch in range(start + 1, stop + 1):
            recording.writer.write({"kind": "step", "epoch": epoch, "step": 10 * epoch - 5, "train_loss": 1.0})
            top1 = 0.7 if epoch == 2 else 0.5
            recording.writer.write({"kind": "epoch", "epoch": epoch, "step": 10 * epoch, "val_top1": top1})
        recording.finish(world_size=1, train_images=100, seconds=5.0 * stop, stop="")
        recording.interrupt()
        return capsys.readouterr().out, json.loads((tmp_path / "run" / "summary.json").read_text())

    return session


def test_a_checkpoint_knows_better_than_a_deleted_file(tmp_path, session):
    path = tmp_path / "run" / "metrics.jsonl"
    _, summary = session(0, 4)
    assert (summary["best_val_top1"], summary["epochs_to_target"]) == (0.7, 2)
    path.unlink()
    told, summary = session(4, 6)
    expected = (
        f"{path} has no records of epoch 1 to 4 of the 4 finished; the checkpoint knows of a best top-1 of 70.00 % "
    )
    assert expected + "in epoch 2; reports leave out those epochs" in told
    assert (summary["best_val_top1"], summary["best_epoch"], summary["epochs"]) == (0.7, 2, 6)
    assert summary["lost_epochs"] == [1, 2, 3, 4]
    assert summary["epochs_to_target"] is None
    told, summary = session(6, 7)  # said once, and kept
    assert "has no records" not in told
    assert summary["best_val_top1"] == 0.7
    assert [r["kind"] for r in jsonl.read(path)].count("gap") == 1


def test_a_file_that_was_cut_in_the_middle(tmp_path, session):
    path = tmp_path / "run" / "metrics.jsonl"
    session(0, 4)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    told, summary = session(4, 5)
    assert "has no records of epoch 3 to 4 of the 4 finished" in told
    assert (summary["best_val_top1"], summary["epochs_to_target"], summary["lost_epochs"]) == (0.7, 2, [3, 4])
    path.write_bytes(content[:40])
    told, _ = session(4, 5, best_epoch=0)  # a checkpoint of version 0.1
    assert "knows of a best top-1 of 70.00 %; reports" in told


def test_whole_records_are_no_gap(session):
    session(0, 4)
    told, summary = session(4, 5)
    assert "has no records" not in told
    assert summary["lost_epochs"] == []


@pytest.mark.parametrize("damaged", ["none", "cut", "set aside before"])
def test_a_run_does_not_begin_anew_over_its_damaged_checkpoints(tmp_path, session, damaged):
    session(0, 4)
    records = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir()
    if damaged != "none":
        (folder / "step-000000040.npz").write_bytes(b"PK")
    for _ in range(1 + (damaged == "set aside before")):
        recording = Recording(config.resolve([f"--run_dir={tmp_path / 'run'}", "--resume"]), 0, 1)
        if damaged == "none":
            assert recording.find_checkpoint() is None
        else:
            with pytest.raises(UserError, match="none of its checkpoints can be used; put a sound one there"):
                recording.find_checkpoint()
        recording.interrupt()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == records
    if damaged != "none":
        assert [p.name for p in folder.iterdir()] == ["step-000000040.npz.damaged"]


def closing_lines(tmp_path, *flags, stop=""):
    run = tmp_path / "a run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (2, 12, 4):
        (run / "checkpoints" / f"step-{step:09d}.npz").touch()
    files = CheckpointStore(run / "checkpoints", 2).paths()
    return closing.lines(config.resolve(["--dataset=folder", f"--data_dir={tmp_path}", *flags]), run, files, stop)


def test_the_end_of_a_run_names_its_checkpoint_and_commands_that_parse(tmp_path):
    first, *commands = closing_lines(tmp_path, "--val_fraction=0.2")
    assert first == f"results: {tmp_path}/a run, newest checkpoint: checkpoints/step-000000012.npz"
    words = [shlex.split(line.removeprefix("next: ")) for line in commands]
    assert [line[:2] for line in words] == [["hybrid-imagenet", name] for name in ("report", "evaluate", "export")]
    assert {line[2] for line in words} == {f"{tmp_path}/a run"}
    assert words[1][3:] == ["--best", "--dataset=folder", f"--data_dir={tmp_path}", "--val_fraction=0.2"]
    evaluate._parser().parse_args(words[1][2:])


def test_the_evaluation_of_a_set_at_a_url_names_where_its_copies_are(tmp_path):
    url = ["--data_dir=https://host/set", f"--data_cache_dir={tmp_path}", "--dataset=webdataset"]
    words = shlex.split(closing_lines(tmp_path, *url)[2])
    assert words[-3:] == ["--dataset=webdataset", *url[:2]]


def test_a_run_that_was_stopped_is_resumed_first(tmp_path):
    assert closing_lines(tmp_path, stop="preempted")[1:] == [
        f"next: the command that started it, with --resume --run_dir='{tmp_path}/a run'",
        f"next: hybrid-imagenet report '{tmp_path}/a run'",
    ]
    assert closing.lines(config.resolve([]), tmp_path, [], "") == [f"results: {tmp_path}"]
