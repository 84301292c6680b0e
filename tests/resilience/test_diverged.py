"""Tests that two ranks whose training diverges end together and keep a checkpoint."""

import pytest

from tests.support import program

FLAGS = (
    "--optimizer=sgd",
    "--model=resnet8",
    "--model_width=4",
    "--image_size=8",
    "--lr_scaling=none",
)


@pytest.mark.slow
def test_run_that_diverges_prints_one_line_and_keeps_its_checkpoint(pools, tiny_data, tmp_path):
    run_dir = tmp_path / "run"
    result = program.train_here(tiny_data, run_dir, *FLAGS, "--lr=0.01", "--epochs=1")
    assert result.returncode == 0, result.stdout + result.stderr
    (saved,) = run_dir.glob("checkpoints/step-*")
    before = saved.read_bytes()
    result = program.train_on(
        pools[2], tiny_data, run_dir, *FLAGS, "--lr=1000", "--epochs=3", "--resume"
    )
    assert result.returncode == 3
    assert result.stderr.count("error:") == 1
    assert "Lower the learning rate" in result.stderr
    assert [(path, path.read_bytes() == before) for path in run_dir.glob("checkpoints/step-*")] == [
        (saved, True)
    ]
    end = program.records(run_dir)[-1]
    assert end["kind"] == "diverged" and end["step"] > 4
    result = program.train_here(tiny_data, run_dir, *FLAGS, "--lr=0.01", "--epochs=2", "--resume")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [r["epoch"] for r in program.records(run_dir) if r["kind"] == "epoch"] == [1, 2]


def test_run_that_diverges_before_metrics_are_read_exits_with_3(tiny_data, tmp_path):
    result = program.train_here(
        tiny_data, tmp_path / "stops", *FLAGS, "--lr=1000", "--log_every_steps=1000"
    )
    assert result.returncode == 3
    assert not list((tmp_path / "stops").glob("checkpoints/step-*"))
    [end] = program.records(tmp_path / "stops")
    assert end["kind"] == "diverged" and end["step"] > 0
