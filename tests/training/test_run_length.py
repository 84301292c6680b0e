"""Runs that end inside an epoch: their records and checkpoints, and their resume."""

import json
import shutil

import numpy as np
import pytest

from tests.support import program

SMALL = ("--optimizer=sgd", "--model_width=4", "--image_size=8")
HALVES = (
    *SMALL,
    "--per_gpu_batch=16",
    "--epochs=1.5",
    "--eval_every_epochs=0.5",
    "--checkpoint_every_epochs=0.75",
    "--keep_checkpoints=5",
    "--nokeep_best",
)


def epoch_records(run_dir):
    return [record for record in program.records(run_dir) if record["kind"] == "epoch"]


@pytest.fixture(scope="module")
def one_and_a_half(tiny_data, tmp_path_factory):
    """Returns a run of one and a half epochs, which are six updates."""
    run_dir = tmp_path_factory.mktemp("halves") / "run"
    done = program.train_here(tiny_data, run_dir, *HALVES)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def test_run_of_fractional_epochs_validates_and_saves_in_between(one_and_a_half):
    run_dir, output = one_and_a_half
    records = epoch_records(run_dir)
    assert [(r["epoch"], r["step"], r["val_count"]) for r in records] == [
        (0.5, 2, program.VALIDATION),
        (1, 4, program.VALIDATION),
        (1.5, 6, program.VALIDATION),
    ]
    assert [r["train_count"] for r in records] == [32, 64, 32]
    assert [p.name for p in sorted((run_dir / "checkpoints").glob("step*"))] == [
        f"step-{step:09d}.npz" for step in (3, 6)
    ]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["epochs"], summary["epochs_planned"], summary["stop"]) == (1.5, 1.5, "finished")
    assert "after 1.5 epochs" in output


@pytest.mark.slow
def test_run_stopped_by_max_steps_resumes_to_the_same_result(tiny_data, tmp_path, one_and_a_half):
    run_dir = tmp_path / "run"
    first = program.train_here(tiny_data, run_dir, *HALVES, "--max_steps=3")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "after 0.75 of 1.5 epochs" in first.stdout
    assert "next: hybrid-imagenet resume " in first.stdout
    assert [(r["epoch"], r["step"]) for r in epoch_records(run_dir)] == [(0.5, 2), (0.75, 3)]
    other = program.train_here(tiny_data, run_dir, *HALVES, "--resume", "--seed=5")
    assert other.returncode == 2
    assert (
        "--seed=5: the run was interrupted within epoch 1, which it began with --seed=0."
        in other.stderr
    )
    named = shutil.copytree(tiny_data, tmp_path / "named")
    (named / "labels.txt").write_text("\n".join("abcd"))
    other = program.train_here(named, run_dir, *HALVES, "--resume")
    assert other.returncode == 2
    assert (
        "the training data differ from the data of the run: other class names. Resume with the data"
        in other.stderr
    )
    second = program.train_here(tiny_data, run_dir, *HALVES, "--resume")
    assert second.returncode == 0, second.stdout + second.stderr
    ours = program.arrays(run_dir)
    expected = program.arrays(one_and_a_half[0])
    assert [name for name, value in expected.items() if not np.array_equal(value, ours[name])] == []
    records = epoch_records(run_dir)
    expected_records = epoch_records(one_and_a_half[0])
    assert [r["epoch"] for r in records] == [0.5, 0.75, 1, 1.5]
    for key in ("val_top1", "val_loss", "learning_rate", "train_count"):
        assert [r[key] for r in records if r["epoch"] != 0.75] == [
            r[key] for r in expected_records
        ], key
