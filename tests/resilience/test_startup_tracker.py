"""Tests reports about ranks that are late while a job starts: their hosts and current stages."""

import os

import pytest

from hybrid_imagenet.resilience import exit_code, startup_tracker
from hybrid_imagenet.resilience.startup_tracker import StartupTracker

WORD = "0123456789abcdef" * 2
STAGE = b"connecting 4 ranks"


def stage_line(rank, stage, size=4):
    return b" at %d of %d on lab%d 7%d\t%s\timport.py:3 load\n" % (
        rank,
        size,
        rank + 1,
        rank,
        stage,
    )


@pytest.fixture
def tracker():
    tracker = StartupTracker(["lab1", "lab2", "lab3", "lab4"])
    for rank in (0, 1, 2):
        assert tracker.record(stage_line(rank, b"loading TensorFlow"), 0.0)
    assert tracker.report_late_ranks(29.0) == ""
    return tracker


def test_report_late_ranks_names_each_late_rank_once(tracker):
    tracker.record(stage_line(0, STAGE), 10.0)
    tracker.record(stage_line(2, STAGE), 39.0)
    assert tracker.report_late_ranks(39.9) == ""
    tracker.record(stage_line(0, STAGE), 40.0)
    assert tracker.report_late_ranks(41.0).splitlines() == [
        (
            "stall: rank 1 on lab2 (process 71) was heard 41 s ago, loading TensorFlow, in"
            " import.py:3 load; others have been connecting 4 ranks for 31 s"
        ),
        "stall: rank 3 on lab4 has not started; others have been connecting 4 ranks for 31 s",
    ]
    assert tracker.report_late_ranks(42.0) == ""
    tracker.record(stage_line(3, STAGE), 43.0)
    # A report with fewer late ranks is not printed.
    assert tracker.report_late_ranks(44.0) == ""


def test_report_late_ranks_is_empty_if_all_are_silent_or_startup_is_over(tracker):
    # During a slow import, which holds the interpreter lock, no rank can report.
    assert tracker.report_late_ranks(100.0) == ""
    tracker.record(stage_line(1, b"loading TensorFlow"), 100.0)
    assert tracker.report_late_ranks(101.0).count("\n") == 3
    tracker.record(stage_line(1, b"over"), 102.0)
    assert tracker.report_late_ranks(1000.0) == ""


@pytest.mark.parametrize(("size", "others"), [(9, "5 more ranks"), (5, "1 more rank")])
def test_report_late_ranks_names_the_first_ones_and_counts_the_others(size, others):
    tracker = StartupTracker()
    for now in (0.0, 20.0):
        tracker.record(stage_line(0, STAGE, size=size), now)
    assert tracker.report_late_ranks(30.5).splitlines()[2:] == [
        "stall: rank 3 has not started; others have been connecting 4 ranks for 30 s",
        f"stall: {others}; others have been connecting 4 ranks for 30 s",
    ]


def hung_line(rank, stage, monkeypatch):
    monkeypatch.setenv(exit_code.JOB_VARIABLE, WORD)
    line = startup_tracker.hung_line(f"error: rank {rank} hung", stage, 120.4, 60.0)
    assert line.startswith(WORD)
    return line.removeprefix(WORD).encode()


def test_report_hung_rank_blames_slow_hosts_once_if_all_ranks_are_loading(monkeypatch, tracker):
    tracker.record(stage_line(3, b"loading TensorFlow"), 1.0)
    lines = [
        tracker.report_hung_rank(hung_line(rank, "loading TensorFlow", monkeypatch))
        for rank in range(4)
    ]
    assert lines[0] == (
        "error: all 4 ranks are still loading TensorFlow after 120 s, because the hosts or their"
        " file system are slow, so the job was stopped (--stall_timeout=60). Raise"
        " --stall_timeout.\n"
    )
    assert lines[1:] == ["", "", ""]


def test_report_hung_rank_passes_on_the_first_line_about_each_stage(monkeypatch, tracker):
    connecting = STAGE.decode()
    stages = [connecting, "loading TensorFlow", connecting, "loading TensorFlow"]
    lines = []
    for rank, stage in enumerate(stages):
        tracker.record(stage_line(rank, stage.encode()), 1.0)
    for rank, stage in enumerate(stages):
        lines.append(tracker.report_hung_rank(hung_line(rank, stage, monkeypatch)))
    assert lines == ["error: rank 0 hung\n", "error: rank 1 hung\n", "", ""]


def test_report_hung_rank_blames_no_host_if_all_ranks_wait_for_one_another(monkeypatch):
    tracker = StartupTracker()
    for rank in range(4):
        tracker.record(stage_line(rank, STAGE), 1.0)
    line = hung_line(2, STAGE.decode(), monkeypatch)
    assert tracker.report_hung_rank(line) == "error: rank 2 hung\n"


@pytest.mark.parametrize(
    "text", [b"", b" ends 4", b" at x of 3 on a 1\ts\tf", b" at 1 of 3 on a 1\ts"]
)
def test_record_returns_false_for_other_lines(text):
    assert not StartupTracker().record(text, 0.0)
    assert StartupTracker().report_hung_rank(text) is None


def test_notify_stage_writes_a_line_for_record_and_does_not_wait_for_a_full_pipe(monkeypatch):
    monkeypatch.setenv(exit_code.JOB_VARIABLE, WORD)
    read, write = os.pipe()
    standard_error = os.dup(2)
    try:
        os.dup2(write, 2)
        startup_tracker.notify_stage(1, 2, "")
        line = os.read(read, 4096)
        os.set_blocking(write, False)
        os.write(write, b"x" * (1 << 16))
        os.set_blocking(write, True)
        startup_tracker.notify_stage(1, 2, None)
    finally:
        os.dup2(standard_error, 2)
        for file in (read, write, standard_error):
            os.close(file)
    assert line.startswith(WORD.encode())
    tracker = StartupTracker()
    for now in (0.0, 20.0):
        assert tracker.record(line.removeprefix(WORD.encode()), now)
    assert (
        tracker.report_late_ranks(30.5)
        == "stall: rank 0 has not started; others have been starting for 30 s\n"
    )
