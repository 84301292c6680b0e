"""Ranks that do not come to the others while a job starts are named, with their hosts and what they
did.
"""

import os

import pytest

from hybrid_imagenet.resilience import exit_code, startup_tracker
from hybrid_imagenet.resilience.startup_tracker import StartupTracker

WORD = "0123456789abcdef" * 2
STAGE = b"connecting 4 ranks"


def said(rank, stage, size=4):
    return b" at %d of %d on lab%d 7%d\t%s\timport.py:3 load\n" % (
        rank,
        size,
        rank + 1,
        rank,
        stage,
    )


@pytest.fixture
def job():
    found = StartupTracker(["lab1", "lab2", "lab3", "lab4"])
    for rank in (0, 1, 2):
        assert found.record(said(rank, b"loading TensorFlow"), 0.0)
    assert found.report_late_ranks(29.0) == ""
    return found


def test_who_has_not_started_and_who_is_behind_are_named_once(job):
    job.record(said(0, STAGE), 10.0)
    job.record(said(2, STAGE), 39.0)
    assert job.report_late_ranks(39.9) == ""
    job.record(said(0, STAGE), 40.0)
    assert job.report_late_ranks(41.0).splitlines() == [
        (
            "stall: rank 1 on lab2 (process 71) was heard 41 s ago, loading TensorFlow, in"
            " import.py:3 load; others have been connecting 4 ranks for 31 s"
        ),
        "stall: rank 3 on lab4 has not started; others have been connecting 4 ranks for 31 s",
    ]
    assert job.report_late_ranks(42.0) == ""
    job.record(said(3, STAGE), 43.0)
    assert job.report_late_ranks(44.0) == ""  # one less is no news


def test_nobody_is_blamed_while_all_are_silent_or_when_the_start_is_over(job):
    assert job.report_late_ranks(100.0) == ""  # a slow import, which holds every rank's interpreter
    job.record(said(1, b"loading TensorFlow"), 100.0)
    assert job.report_late_ranks(101.0).count("\n") == 3
    job.record(said(1, b"over"), 102.0)
    assert job.report_late_ranks(1000.0) == ""


def test_many_ranks_are_counted():
    found = StartupTracker()
    for now in (0.0, 20.0):
        found.record(said(0, STAGE, size=9), now)
    assert found.report_late_ranks(30.5).splitlines()[2:] == [
        "stall: rank 3 has not started; others have been connecting 4 ranks for 30 s",
        "stall: 5 more ranks; others have been connecting 4 ranks for 30 s",
    ]


@pytest.mark.parametrize(
    "text", [b"", b" ends 4", b" at x of 3 on a 1\ts\tf", b" at 1 of 3 on a 1\ts"]
)
def test_other_lines_are_none(text):
    assert not StartupTracker().record(text, 0.0)


def test_a_line_is_heard_as_it_was_written_and_a_full_pipe_is_not_waited_for(monkeypatch):
    monkeypatch.setenv(exit_code.JOB_VARIABLE, WORD)
    read, write = os.pipe()
    own = os.dup(2)
    try:
        os.dup2(write, 2)
        startup_tracker.notify_stage(1, 2, "")
        line = os.read(read, 4096)
        os.set_blocking(write, False)
        os.write(write, b"x" * (1 << 16))
        os.set_blocking(write, True)
        startup_tracker.notify_stage(1, 2, None)
    finally:
        os.dup2(own, 2)
        for file in (read, write, own):
            os.close(file)
    assert line.startswith(WORD.encode())
    job = StartupTracker()
    for now in (0.0, 20.0):
        assert job.record(line.removeprefix(WORD.encode()), now)
    assert (
        job.report_late_ranks(30.5)
        == "stall: rank 0 has not started; others have been starting for 30 s\n"
    )
