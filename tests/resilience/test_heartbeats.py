"""Tests verdicts on ranks that hang, and heartbeats between real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from types import ModuleType
from unittest import mock

import pytest

from hybrid_imagenet.comm.single_process import SingleProcess
from hybrid_imagenet.errors import EXIT_USAGE
from hybrid_imagenet.resilience import watchdog
from hybrid_imagenet.resilience.heartbeats import Heartbeat, HeartbeatLog
from hybrid_imagenet.resilience.stacks import path_in_stack
from tests.support.processes import python

WAITS = (
    "hybrid_imagenet/training/step.py:65 single",
    "hybrid_imagenet/training/trainer.py:190 _run_step",
)
READS = ("/usr/lib/python3/os.py:10 pread", "hybrid_imagenet/training/trainer.py:205 _next")


def beat(rank, step=7, idle=0.0, stack=WAITS, mean=0.1, **more):
    return Heartbeat(rank, f"node{rank}", 100 + rank, step, idle, mean, stack, **more)


def log_of(*beats, at=0.0, patience=10.0):
    log = HeartbeatLog(patience, [path_in_stack(ModuleType("hybrid_imagenet.training.step"))])
    for heartbeat in beats:
        log.record(heartbeat, at)
    return log


def test_find_stall_reports_a_silent_rank_with_host_process_step_and_stack():
    log = log_of(beat(0), beat(1, stack=READS), beat(2))
    assert log.find_stall(9.9) is None
    log.record(beat(0), 10.5)
    log.record(beat(2), 10.5)
    stall = log.find_stall(11.0)
    assert stall.ranks == (1,)
    assert stall.seconds == 11.0
    first, *stack = stall.report.splitlines()
    assert first == (
        "stall: rank 1 on node1 (process 101) has been silent for 11 s (last step: 7). Python"
        " stack:"
    )
    assert stack == [f"stall:   {frame}" for frame in READS]


def test_find_stall_reports_all_ranks_of_a_lost_host_together():
    log = log_of(beat(0), beat(1))
    log.record(beat(2), 4.5)
    log.record(beat(3), 9.0)
    assert log.find_stall(10.0) is None
    stall = log.find_stall(10.5)
    assert (stall.ranks, stall.seconds) == ((0, 1, 2), 10.5)


def test_find_stall_reports_a_rank_with_overdue_heartbeats_as_silent():
    log = log_of(beat(0), beat(1, idle=0.5))
    log.record(beat(0, idle=10.1), 9.7)
    assert log.find_stall(9.7) is None
    assert "rank 1 on node1 (process 101) has been silent" in log.find_stall(10.1).report
    log.record(beat(1, idle=10.6, step=6), 10.1)
    log.record(beat(0, idle=10.5), 10.1)
    assert "rank 1 on node1 (process 101) has made no progress" in log.find_stall(10.2).report


def test_find_stall_before_the_first_step_reports_only_silent_ranks():
    log = log_of(beat(0, step=None), beat(1, step=None))
    log.record(beat(0, step=None), 20.0)
    stall = log.find_stall(20.0)
    assert stall.ranks == (1,)
    assert "has been silent for 20 s (no step reported). Python stack:" in stall.report
    log.record(beat(1, step=None), 21.0)
    assert log.find_stall(22.0) is None


@pytest.mark.parametrize(
    ("beats", "culprits"),
    [
        # Rank 1 is behind the others.
        ([beat(0, idle=11), beat(1, idle=11, step=6), beat(2, idle=11)], (1,)),
        # Rank 1 does not wait for others.
        ([beat(0, idle=11), beat(1, idle=11, stack=READS)], (1,)),
        # The ranks do not differ.
        ([beat(0, idle=11), beat(1, idle=11)], (0, 1)),
        # Rank 1 advances.
        ([beat(0, idle=11), beat(1, idle=2, stack=READS)], None),
        # Steps take long.
        ([beat(0, idle=11, mean=5.0), beat(1, idle=11, mean=5.0)], None),
        ([beat(0, idle=21, mean=5.0), beat(1, idle=21, mean=5.0)], (0, 1)),
    ],
)
def test_find_stall_without_progress_returns_the_culprits(beats, culprits):
    stall = log_of(*beats).find_stall(0.0)
    assert (stall and stall.ranks) == culprits


def test_stall_report_has_a_hint_if_ranks_wait_in_different_places():
    merges = (WAITS[0], "hybrid_imagenet/callbacks/metric_average.py:60 on_epoch_end")
    for others, has_hint in ((WAITS, False), (merges, True), (READS, False)):
        text = log_of(beat(0, idle=11), beat(1, idle=11, stack=others)).find_stall(0.0).report
        assert ("need equal numbers of batches" in text) == has_hint


def test_find_stall_ignores_ranks_that_left_or_never_sent_a_heartbeat():
    log = log_of(beat(0), beat(1))
    log.record(beat(1, leaving=True), 1.0)
    log.record(beat(0), 30.0)
    assert log.find_stall(30.0) is None
    assert log.seconds_silent(1, 30.0) == log.seconds_silent(5, 30.0) == 0.0


def test_forgive_excludes_the_time_in_which_the_listener_was_stopped():
    log = log_of(beat(0), beat(1))
    log.forgive(100.0)
    assert log.find_stall(105.0) is None
    assert log.find_stall(111.0).ranks == (0, 1)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        # All ranks stop after the same step, and some have not noticed it yet.
        ([beat(0, begun_steps=7, has_stopped=True), beat(1, begun_steps=7)], ([0], [])),
        ([beat(r, begun_steps=7, has_stopped=True) for r in range(2)], ([0, 1], [])),
        # The other ranks have begun a step without those that have stopped.
        ([beat(0, begun_steps=8), beat(1, has_stopped=True)], ([1], [0])),
        ([beat(0, step=8, begun_steps=8), beat(1, has_stopped=True)], ([1], [0])),
        ([beat(r, begun_steps=8) for r in range(2)], ([], [])),
    ],
)
def test_find_separate_stop_returns_ranks_that_wait_for_a_stopped_one(beats, expected):
    assert log_of(*beats).find_separate_stop() == expected


def test_watchdog_ends_the_job_if_one_rank_has_stopped_alone(tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr(watchdog, "end_process", lambda *arguments: ends.append(arguments))
    communicator = mock.Mock(
        rank=0,
        hosts=("a", "b"),
        broadcast_object=lambda value: value,
        allgather_object=lambda value: [value, [[], 1]],
    )
    dog = watchdog.Watchdog(communicator, 60.0)
    dog._log.record(beat(0, step=3, begun_steps=4), 0.0)
    dog._check_stops()
    assert ends == []
    dog._log.record(beat(1, step=3, begun_steps=3, has_stopped=True), 0.0)
    dog._check_stops()
    ((line, code),) = ends
    assert code == EXIT_USAGE
    assert line.startswith(
        "error: rank 1 on b stopped after step 3 (stop_training), but rank 0 on a began the next"
    )
    # The rank may go on after all, because another callback has reset `stop_training`.
    dog.record_stop()
    dog.record_begin(5)
    assert not dog._heartbeat().has_stopped


@pytest.mark.parametrize(("has_long_steps", "mean"), [(False, 0.0), (True, 1000.0)])
def test_mean_step_of_a_watchdog_with_long_steps_includes_the_first(
    has_long_steps, mean, monkeypatch
):
    now = 100.0
    monkeypatch.setattr(watchdog, "time", mock.Mock(monotonic=lambda: now))
    dog = watchdog.Watchdog(mock.Mock(rank=0, hosts="a"), 0.0, has_long_steps=has_long_steps)
    now += 1000.0
    dog.record_progress(20)
    assert dog._heartbeat().mean_step_seconds == mean
    # Short work between long steps does not make them short.
    for _ in range(50):
        now += 0.1
        dog.record_progress()
    now += 995.0
    dog.record_progress(40)
    expected = mean if has_long_steps else 1000.0 / 51
    assert dog._heartbeat().mean_step_seconds == pytest.approx(expected)


def test_record_progress_reaches_the_watchdogs_that_run():
    communicator = SingleProcess()
    dog = watchdog.Watchdog(communicator, 60.0)
    dog.start()
    dog.record_progress(1)
    before = dog._progress_count
    watchdog.record_progress()
    assert dog._progress_count == before + 1
    dog.stop()
    watchdog.record_progress()
    assert dog._progress_count == before + 1


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("a", (0,)), ("aa", (0, 1)), ("aabb", (0, 2)), ("aaaa", (0, 1)), ("abc", (0, 1))],
)
def test_listener_ranks_are_on_two_hosts_if_possible(hosts, expected):
    assert watchdog.listener_ranks(tuple(hosts)) == expected


def start(folder, size, limit, *hanging):
    words = ("-m", "tests.resilience.watched_rank", folder)
    return [python(*words, rank, size, limit, *hanging) for rank in range(size)]


def finish(processes, number):
    try:
        output = processes[number].communicate(timeout=60)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
    for process in processes:
        process.communicate()
    return processes[number].returncode, output[1]


def test_watchdog_of_a_job_with_a_stopped_rank_names_it_and_exits_with_4(tmp_path):
    jobs = {}
    for stopped in (1, 0):
        (tmp_path / str(stopped)).mkdir()
        jobs[stopped] = start(tmp_path / str(stopped), 3, 4)
    for process in (*jobs[0], *jobs[1]):
        assert process.stdout.readline() == "training\n"
    # Wait for at least one heartbeat with a step.
    time.sleep(0.6)
    for stopped, processes in jobs.items():
        os.kill(processes[stopped].pid, signal.SIGSTOP)
    for stopped, processes in jobs.items():
        code, errors = finish(processes, 1 - stopped)
        assert code == 4
        pid = processes[stopped].pid
        assert re.search(
            rf"stall: rank {stopped} on here \(process {pid}\) has been silent for \d+ s", errors
        )
        # The report has the stack of the main thread.
        assert re.search(r"Python stack:\nstall: +\S+:\d+ \S+\n", errors)
        assert f"error: rank {stopped} on here hung for" in errors
        assert "--stall_timeout=4" in errors
        assert errors.count("stall: rank") == 1


def test_watchdog_of_a_deputy_that_hears_no_other_rank_names_the_deputy(tmp_path):
    processes = start(tmp_path, 3, 4)
    for process in processes:
        assert process.stdout.readline() == "training\n"
    time.sleep(0.6)
    for silent in (0, 2):
        os.kill(processes[silent].pid, signal.SIGSTOP)
    code, errors = finish(processes, 1)
    assert code == 4
    first, last = errors.splitlines()
    assert first == "stall: rank 1 on here hears no other rank"
    assert last.startswith("error: rank 1 on here heard no other rank for ")


def test_watchdog_of_a_job_with_a_hanging_rank_names_it_and_exits_with_4(tmp_path):
    code, errors = finish(start(tmp_path, 3, 3, 2), 0)
    assert code == 4
    assert "rank 2 on here" in errors
    assert "has made no progress" in errors
    assert "step_that_hangs" in errors


@pytest.mark.slow
def test_watchdog_on_a_loaded_machine_does_not_report_slow_ranks(tmp_path):
    processes = start(tmp_path, 3, 8, "busy")
    for process in processes:
        assert process.stdout.readline() == "training\n"
    burn = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(burn) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        time.sleep(8)
        assert all(process.poll() is None for process in (*processes, *others))
    finally:
        for process in (*processes, *others):
            process.kill()
            if process in others:
                process.wait()
    assert [process.communicate()[1] for process in processes] == ["", "", ""]
