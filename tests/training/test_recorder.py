"""Recording: sessions of a run, damaged records, and the lines at the start and end."""

import dataclasses
import importlib.util
import json
import logging
import pathlib
import shlex
import shutil
import types

import pytest

from hybrid_imagenet import config, run_plan
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.commands import evaluate
from hybrid_imagenet.commands.report import load
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.runlog import state
from hybrid_imagenet.training.recorder import Recording, closing_lines

FACTS = {"train_images": 100, "validation_images": 10, "world_size": 1, "precision": "float32"}


@pytest.fixture
def session(tmp_path, capsys):
    """Returns a function that writes the records of one session, from one epoch to another."""

    def session(start, stop):
        flags = [
            f"--run_dir={tmp_path / 'run'}",
            "--epochs=9",
            "--warmup_epochs=0",
            "--target_top1=0.6",
        ]
        recording = Recording(
            run_plan.make(config.resolve([*flags, *(["--resume"] if start else [])])), 0, 1
        )
        state = RunState(
            Cursor(start, 0),
            10 * start,
            finished_epochs=start,
            recorded_at=float(start),
            seconds=5.0 * start,
        )
        state.best_top1, state.best_epoch = (0.7, 2) if start else (0.0, 0)
        recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, state)
        for epoch in range(start + 1, stop + 1):
            recording.writer.write(
                {"kind": "step", "epoch": epoch, "step": 10 * epoch - 5, "train_loss": 1.0}
            )
            top1 = 0.7 if epoch == 2 else 0.5
            recording.writer.write(
                {"kind": "epoch", "epoch": epoch, "step": 10 * epoch, "val_top1": top1}
            )
        recording.finish(RunState(seconds=5.0 * stop))
        recording.interrupt()
        return capsys.readouterr().out, json.loads((tmp_path / "run" / "summary.json").read_text())

    return session


def test_recording_counts_missing_records_of_finished_epochs(tmp_path, session):
    path = tmp_path / "run" / "metrics.jsonl"
    session(0, 4)
    content = path.read_bytes()
    printed, summary = session(4, 5)
    assert "no records" not in printed
    assert summary["lost_epochs"] == []
    path.write_bytes(content[: len(content) // 2])
    printed, summary = session(4, 6)
    assert "no records of 2 of the 4 finished epochs (the first is 3)" in printed
    # This line is printed at the end.
    assert "no records of 2 epochs:" in printed
    assert (summary["lost_epochs"], summary["epochs"]) == ([3, 4], 6)


@pytest.mark.parametrize("damaged", ["none", "cut", "set aside before"])
def test_recording_with_only_damaged_checkpoints_does_not_start_over(tmp_path, session, damaged):
    session(0, 4)
    records = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir()
    if damaged != "none":
        (folder / "step-000000040.npz").write_bytes(b"PK")
    for _ in range(1 + (damaged == "set aside before")):
        recording = Recording(
            run_plan.make(config.resolve([f"--run_dir={tmp_path / 'run'}", "--resume"])), 0, 1
        )
        if damaged == "none":
            assert recording.find_checkpoint() is None
        else:
            with pytest.raises(UserError, match="none of its checkpoints can be used"):
                recording.find_checkpoint()
        recording.interrupt()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == records
    if damaged != "none":
        assert [p.name for p in folder.iterdir()] == ["step-000000040.npz.damaged"]


def last_lines(tmp_path, *flags, stop=""):
    run = tmp_path / "a run"
    (run / "checkpoints").mkdir(parents=True)
    for step in (2, 12, 4):
        (run / "checkpoints" / f"step-{step:09d}.npz").touch()
    files = CheckpointStore(run / "checkpoints", 2).paths()
    return closing_lines(
        run_plan.make(config.resolve(["--dataset=folder", f"--data_dir={tmp_path}", *flags])),
        run,
        files,
        stop,
    )


def test_closing_lines_name_the_checkpoint_and_valid_commands(tmp_path):
    skip = ["--bad_records=skip", "--max_bad_records=7"]
    first, *commands = last_lines(tmp_path, "--val_fraction=0.2", *skip)
    assert first == f"results: {tmp_path}/a run, newest checkpoint: checkpoints/step-000000012.npz"
    words = [shlex.split(line.removeprefix("next: ")) for line in commands]
    assert [line[:2] for line in words] == [
        ["hybrid-imagenet", name] for name in ("report", "evaluate", "export")
    ]
    assert {line[2] for line in words} == {f"{tmp_path}/a run"}
    # The dataset, and how it is read, are in the run.
    assert words[1][3:] == ["--best"]
    evaluate._parser().parse_args(words[1][2:])


def test_closing_lines_of_a_user_function_name_it(tmp_path):
    _, report, *commands = last_lines(tmp_path, "--model=own.module:network")
    assert "--model" not in report
    assert len(commands) == 2
    assert all(line.endswith(" --model=own.module:network") for line in commands)


@pytest.mark.parametrize("missing", ["onnx", "tf2onnx", "onnxruntime"])
def test_closing_lines_without_an_onnx_package_suggest_a_keras_file(missing, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec

    def without_missing(name):
        return None if name == missing else find_spec(name)

    def with_all(name):
        return find_spec("os") if name in ("onnx", "tf2onnx", "onnxruntime") else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_missing)
    assert last_lines(tmp_path)[-1].endswith("network.keras'")
    monkeypatch.setattr(importlib.util, "find_spec", with_all)
    (tmp_path / "second").mkdir()
    assert last_lines(tmp_path / "second")[-1].endswith("network.onnx'")


def test_closing_lines_hide_passwords(tmp_path):
    url = [
        "--data_dir=https://ann:hunter2@host/set",
        f"--data_cache_dir={tmp_path}",
        "--dataset=webdataset",
    ]
    lines = last_lines(tmp_path, *url)
    assert shlex.split(lines[2])[-1] == "--data_dir=https://***@host/set"
    assert "--data_dir=https://***@host/set" in "\n".join(lines)
    assert "hunter2" not in "\n".join(lines)


def test_closing_lines_of_a_stopped_run_begin_with_resume(tmp_path):
    first, *commands = last_lines(tmp_path, stop="preempted")
    assert first.startswith("stopped on request; results: ")
    assert commands == [
        f"next: hybrid-imagenet resume '{tmp_path}/a run'",
        f"next: hybrid-imagenet report '{tmp_path}/a run'",
    ]
    assert closing_lines(run_plan.make(config.resolve([])), tmp_path, [], "") == [
        f"results: {tmp_path}"
    ]


def test_closing_lines_of_a_run_that_a_callback_stopped_have_its_reason(tmp_path):
    first, *_ = closing_lines(run_plan.make(config.resolve([])), tmp_path, [], "gradients")
    assert first == f"stopped by a callback (gradients); results: {tmp_path}"


def test_closing_lines_after_max_steps_resume_if_epochs_are_left(tmp_path):
    resume = [f"next: hybrid-imagenet resume '{tmp_path}/a run'"]
    assert last_lines(tmp_path, "--max_steps=3")[1:2] == resume
    files = CheckpointStore(tmp_path / "a run" / "checkpoints", 2).paths()
    lines = closing_lines(
        run_plan.make(config.resolve(["--max_steps=3"])),
        tmp_path / "a run",
        files,
        "",
        is_complete=True,
    )
    assert not set(resume) & set(lines)


def test_recording_of_a_resume_without_a_step_keeps_config_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = tmp_path / "run" / "config.json"
    for more in (["--lr=1", "--data_dir=set"], ["--lr=2", "--resume"]):
        recording = Recording(
            run_plan.make(
                config.resolve(["--run_dir=run", "--optimizer=sgd", "--dataset=folder", *more])
            ),
            0,
            1,
        )
        recording.start(
            FACTS,
            {"world_size": 1, "images_per_epoch": 100},
            RunState(),
            is_over="--resume" in more,
        )
        recording.interrupt()
        assert json.loads(written.read_text())["flags"]["lr"] == 1
    assert json.loads(written.read_text())["flags"]["data_dir"] == str(tmp_path / "set")


@pytest.mark.parametrize(
    ("epochs_done", "end", "flag", "expected_state"),
    [
        (9, "finished", "--epochs=4", state.FINISHED),
        (9, "finished", "--max_steps=40", state.FINISHED),
        (9, "killed", "--epochs=9", state.FINISHED),
        (5, "preempted", "--epochs=4", state.STOPPED),
        (5, "preempted", "--max_steps=40", state.STOPPED),
        (5, "killed", "--epochs=4", state.KILLED),
    ],
)
def test_recording_of_a_resume_without_a_step_keeps_the_state_of_the_run(
    tmp_path, epochs_done, end, flag, expected_state
):
    run = tmp_path / "run"
    position = RunState(
        Cursor(epochs_done, 0),
        10 * epochs_done,
        finished_epochs=epochs_done,
        recorded_at=float(epochs_done),
    )
    info = {"world_size": 1, "images_per_epoch": 100}
    flags = [f"--run_dir={run}", "--warmup_epochs=0"]
    first = Recording(run_plan.make(config.resolve([*flags, "--epochs=9"])), 0, 1)
    first.start(FACTS, info, RunState())
    first.writer.write({"kind": "epoch", "epoch": epochs_done, "step": 10 * epochs_done})
    if end == "killed":
        first.interrupt()
    else:
        first.finish(dataclasses.replace(position, stop=end))
        first.stop_logging()
    for _ in range(2):
        resumed = Recording(run_plan.make(config.resolve([*flags, flag, "--resume"])), 0, 1)
        resumed.start(FACTS, info, position, is_over=True)
        resumed.finish(position)
        resumed.stop_logging()
        assert load.load_run(run).state == expected_state


def test_recording_in_a_deleted_directory_is_rejected_after_a_validation(tmp_path):
    recording = Recording(run_plan.make(config.resolve([f"--run_dir={tmp_path / 'run'}"])), 0, 1)
    recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, RunState())
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(
        UserError, match="run was deleted during the run, so nothing more can be recorded"
    ):
        recording.keep_image_results(types.SimpleNamespace(image_results=dict))
    recording.interrupt()


def test_recording_on_a_full_disk_is_interrupted_without_a_second_error(tmp_path):
    recording = Recording(run_plan.make(config.resolve([f"--run_dir={tmp_path / 'run'}"])), 0, 1)
    recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, RunState())
    with pathlib.Path("/dev/full").open("w") as full_disk:
        recording.writer._file = full_disk
        with pytest.raises(UserError, match="No space left"):
            recording.writer.write({"kind": "step", "step": 1})
        recording.interrupt()


@pytest.mark.parametrize("progress", ["plain", "none"])
@pytest.mark.parametrize("verbose", [True, False])
def test_recording_prints_title_and_buckets_only_if_requested(progress, verbose, tmp_path, capsys):
    flags = [
        f"--run_dir={tmp_path / 'run'}",
        f"--progress={progress}",
        "--dataset=digits",
        "--per_gpu_batch=8",
    ]
    recording = Recording(
        run_plan.make(config.resolve([*flags, *(["--verbose"] if verbose else [])])), 0, 1
    )
    recording.start(FACTS, {"world_size": 1, "images_per_epoch": 100}, RunState())
    logging.getLogger("hybrid_imagenet.comm.gradients").debug("gradients: 3 in 1 bucket")
    recording.interrupt()
    first, *rest = capsys.readouterr().out.splitlines()
    # With other kinds of progress, the title is already printed at the start.
    title = "resnet50 on digits, 1 rank x 8 images, " if progress == "none" else ""
    assert (
        first
        == f"{title}100 training and 10 validation images, float32, results in {tmp_path / 'run'}"
    )
    assert ("gradients: 3 in 1 bucket" in rest) == verbose
