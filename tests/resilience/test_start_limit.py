"""Tests that ranks that hang before there is a watchdog end themselves with one line."""

import fcntl
import os
import subprocess
import sys
import time

import pytest

from hybrid_imagenet.resilience import exit_code, watchdog
from hybrid_imagenet.startup import StartupProgress
from tests.ranks import ROOT

HANGS = """
import sys, time
from hybrid_imagenet.resilience import watchdog
from hybrid_imagenet.startup import StartupProgress
watchdog._MIN_STAGE_SECONDS = 0.0
start = StartupProgress()
watchdog.watch_startup(start, float(sys.argv[1]), 3)
for stage in sys.argv[2:]:
    start.begin(stage)
    time.sleep(0.5)
def blocks():
    time.sleep(60)
blocks()
"""


def begin(*words, stderr=subprocess.PIPE):
    return subprocess.Popen(
        [sys.executable, "-c", HANGS, *words], cwd=ROOT, stderr=stderr, text=True
    )


def test_startup_stage_that_takes_too_long_prints_one_line_and_exits_with_4():
    began = time.monotonic()
    process = begin("0.5", "loading TensorFlow", "connecting 4 ranks")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 4
    assert errors.count("\n") == 1
    assert (
        errors.startswith("error: rank 3 on ")
        and "while connecting 4 ranks, in " in errors
        and "so the job was stopped (--stall_timeout=0.5)." in errors
    )
    assert "blocks" in errors
    assert time.monotonic() - began < 15


def test_startup_stage_that_reads_many_files_has_more_time():
    process = begin("0.5", "reading the dataset")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.2)
    assert process.wait(20) == 4
    process.stderr.close()


def test_startup_limit_ends_a_rank_whose_standard_error_is_blocked():
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, b"x" * 4096)
    process = begin("0.3", "loading TensorFlow", stderr=write)
    try:
        assert process.wait(20) == 4
    finally:
        process.kill()
        os.close(read)
        os.close(write)


def test_startup_limit_does_not_apply_after_startup():
    running = {}
    for end in ("finish", "close"):
        program = HANGS.replace(
            "def blocks", f"start.{end}()\ntime.sleep(3); sys.exit(0)\ndef blocks"
        )
        running[end] = subprocess.Popen([sys.executable, "-c", program, "0.3", "x"], cwd=ROOT)
    codes = {end: process.wait(30) for end, process in running.items()}
    assert codes == {"finish": 0, "close": 0}


@pytest.mark.parametrize("is_importing", [False, True])
def test_startup_limit_ends_a_rank_whose_native_code_holds_the_interpreter_lock(is_importing):
    holds_lock = "import ctypes; ctypes.PyDLL(None).sleep(60)"
    if is_importing:
        holds_lock = (
            "from hybrid_imagenet.cluster import quiet\n"
            f"    with quiet._native_stderr_dropped(): {holds_lock}"
        )
    program = HANGS.replace("time.sleep(60)", holds_lock)
    program = program.replace(
        "start = StartupProgress()",
        "watchdog._NATIVE_CODE_GRACE_SECONDS = 1.0; start = StartupProgress()",
    )
    began = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", program, "0.5", "x"], cwd=ROOT, capture_output=True, timeout=50
    )
    assert process.returncode == 1
    assert b"in blocks" in process.stderr
    assert time.monotonic() - began < 15


def test_startup_limit_that_passed_while_the_process_was_suspended_ends_the_rank(monkeypatch):
    def raise_line(line):
        raise SystemExit(line)

    monkeypatch.setattr(watchdog, "exit_stalled", raise_line)
    start = StartupProgress()
    start.stage = ("loading TensorFlow", time.monotonic() - 100_000)
    with pytest.raises(SystemExit, match="hung for 100000 s while loading TensorFlow"):
        watchdog._watch_startup(start, 1.0, 0, 1, 2)
    # The supervisor prints the line, because other ranks may reach the limit too.
    word = "0123456789abcdef" * 2
    monkeypatch.setenv(exit_code.JOB_VARIABLE, word)
    line_for_supervisor = rf"{word} hung 100000 1\tloading TensorFlow\terror: rank 0 on "
    with pytest.raises(SystemExit, match=line_for_supervisor):
        watchdog._watch_startup(start, 1.0, 0, 1, 2)
