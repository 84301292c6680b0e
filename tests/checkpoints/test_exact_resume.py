"""A run that is killed at any moment and resumed ends bitwise as an undisturbed one."""

import random

import numpy as np
import pytest

from tests.checkpoints import killed_at
from tests.support import program

# Epochs of four steps; T is after the first. Each moment belongs to the session that ends with it.
SHORT = (("in batch norm synchronization", 4), ("at phase switch", 4), ("before rename", 7))


def long_form():
    """Every kind of moment and random steps, ten in all, in the order of steps."""
    generator = random.Random(11)
    named = [("in checkpoint", 2), ("in validation", 4), *SHORT]
    last = [("before epoch record", 8), ("after epoch record", 8), ("after epoch checkpoint", 8)]
    anywhere = [("in step", step) for step in generator.sample((1, 3, 5, 6, 9, 10, 11), 2)]
    return tuple(sorted((*named, *last, *anywhere), key=lambda moment: moment[1]))


@pytest.mark.parametrize("moments", [SHORT, pytest.param(long_form(), marks=pytest.mark.slow)], ids=["short", "long"])
def test_a_run_killed_at_any_moment_ends_like_an_undisturbed_one(tmp_path, moments):
    data, run_dir = program.make_data(tmp_path / "data"), tmp_path / "killed"
    flags = ("--checkpoint_every_steps=1", "--keep=3")
    for session, (moment, step) in enumerate(moments):
        again = ["--resume"] if session else []
        start = ["-m", killed_at.__name__, moment, str(step)]
        killed = program.train(2, data, run_dir, *flags, *again, start=start)
        assert killed.returncode == -9, (moment, killed.stdout + killed.stderr)
        assert max((r["step"] for r in program.records(run_dir)), default=0) <= step + 2
    done = program.train(2, data, run_dir, *flags, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed = program.train(2, data, tmp_path / "undisturbed", "--keep=3")
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
    expected, ours = program.arrays(tmp_path / "undisturbed"), program.arrays(run_dir)
    assert expected.keys() == ours.keys()
    assert [name for name in expected if not np.array_equal(expected[name], ours[name])] == []
    assert program.without_times(run_dir) == program.without_times(tmp_path / "undisturbed")


def test_the_long_form_has_ten_moments_of_every_kind():
    assert len(long_form()) == 10
    assert {moment for moment, _ in long_form()} == set(killed_at.MOMENTS)
