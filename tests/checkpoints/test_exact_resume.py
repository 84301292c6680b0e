"""A run that is killed at any moment and resumed ends bitwise like an undisturbed one."""

import random

import numpy as np
import pytest

from tests.checkpoints import killed_at
from tests.runlog.test_tensorboard import events
from tests.support import program

# An epoch has four steps, and the warmup ends after the first. Each moment ends one session.
SHORT = (("at phase switch", 4),)
LATE = ("before rename", 7)


def all_moments():
    """Returns every kind of moment and two random steps, ten in all, in the order of steps."""
    generator = random.Random(11)
    named = [
        ("in checkpoint", 2),
        ("in validation", 4),
        ("in batch norm synchronization", 4),
        *SHORT,
        LATE,
    ]
    last = [("before epoch record", 8), ("after epoch record", 8), ("after epoch checkpoint", 8)]
    anywhere = [("in step", step) for step in generator.sample((1, 3, 5, 6, 9, 10, 11), 2)]
    return tuple(sorted((*named, *last, *anywhere), key=lambda moment: moment[1]))


# Every event of the callbacks, in the order of steps.
EVENTS = (
    ("on_train_batch_begin", 2),
    ("on_train_batch_end", 3),
    ("on_test_begin", 4),
    ("on_test_batch_end", 4),
    ("on_test_end", 8),
    ("on_epoch_end", 8),
    ("on_epoch_begin", 8),
)


def assert_same_run(ours, expected):
    arrays = program.arrays(ours)
    assert arrays.keys() == program.arrays(expected).keys()
    assert [
        name
        for name, value in program.arrays(expected).items()
        if not np.array_equal(value, arrays[name])
    ] == []
    assert program.without_times(ours) == program.without_times(expected)


def kill_and_resume(pool, data, run_dir, moments, *flags):
    """Kills each session at its moment; the last one runs to its end on the ranks of a pool."""
    flags = ("--checkpoint_every_steps=1", *flags)
    for session, (moment, step) in enumerate(moments):
        resume = ["--resume"] if session else []
        start = ["-m", killed_at.__name__, moment, str(step)]
        killed = program.train(2, data, run_dir, *flags, *resume, start=start)
        assert killed.returncode == -9, (moment, killed.stdout + killed.stderr)
        assert max((r["step"] for r in program.records(run_dir)), default=0) <= step + 2
    done = program.train_on(pool, data, run_dir, *flags, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at epoch" in done.stdout


def test_run_killed_and_resumed_ends_like_an_undisturbed_one(
    pools, tiny_data, undisturbed, tmp_path
):
    kill_and_resume(
        pools[2], tiny_data, tmp_path / "killed", SHORT, "--tensorboard", *program.METHODS
    )
    assert_same_run(tmp_path / "killed", undisturbed[0])
    scalars = [(step, tag) for step, tag, *_ in events(tmp_path / "killed" / "tensorboard")]
    assert len(scalars) == len(set(scalars)), "an event was written again after a kill"


@pytest.mark.slow
def test_run_killed_at_every_kind_of_moment_ends_like_an_undisturbed_one(
    pools, tiny_data, tmp_path
):
    kill_and_resume(pools[2], tiny_data, tmp_path / "killed", all_moments(), "--keep_checkpoints=3")
    done = program.train(2, tiny_data, tmp_path / "undisturbed", "--keep_checkpoints=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")


@pytest.mark.slow
def test_run_killed_after_each_event_of_callbacks_ends_like_an_undisturbed_one(
    pools, tiny_data, tmp_path
):
    kill_and_resume(pools[2], tiny_data, tmp_path / "killed", EVENTS, *program.METHODS)
    done = program.train(2, tiny_data, tmp_path / "undisturbed", *program.METHODS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")
