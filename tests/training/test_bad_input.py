"""Combinations that cannot work end the program with one line that names the flags, and exit code 2."""

import pytest

from tests.support import program


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--gradient_accumulation_steps=2", "--sync_batch_norm"],
            ["--gradient_accumulation_steps", "--sync_batch_norm"],
        ),
        (["--allreduce=torus", "--torus_grid=3x2"], ["--torus_grid=3x2", "holds 6 ranks, not 1: use 1x1"]),
        (["--batch_schedule=1:*9"], ["--batch_schedule=1:*9", "make a batch of 72 from epoch 1", "64 training images"]),
        (["--precision=mixed_float16", "--model=resnet50"], ["--precision=mixed_float16", "--model=resnet50", "GPU"]),
    ],
)
def test_an_impossible_combination_is_one_line(tiny_data, tmp_path, flags, words):
    done = program.train_here(tiny_data, tmp_path / "run", *flags)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
