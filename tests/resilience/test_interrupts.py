"""Tests Ctrl-C in commands that do not train."""

import os
import signal
import time

import pytest

from tests.support import processes

WORK = """
import os, time
from hybrid_imagenet.resilience import interrupts
from hybrid_imagenet.resilience.interrupts import run_interruptible
from studies.running import resumable

def wait():
    print("ready", flush=True)
    time.sleep(60)

class Deleted:
    def __init__(self, then=wait):
        self.then = then
    def __del__(self):
        self.then()

def clean():
    try:
        wait()
    finally:
        print("cleaned")

def converted():
    try:
        wait()
    except BaseException:
        raise ImportError("numpy cannot be imported")

def swallowed():
    try:
        wait()
    except BaseException:
        wait()

def executed():
    exec("wait()")

def late():
    global one
    one = Deleted(lambda kill=os.kill, process=os.getpid(): kill(process, 2))
    return 0

def resumed():
    interrupts._exit_timer.interval = 0.2
    def ends_processes():
        try:
            wait()
        finally:
            time.sleep(1)
    return resumable(ends_processes)

def deleted():
    Deleted()
    wait()

raise SystemExit(run_interruptible({work}))
"""


def run_with_presses(work, presses):
    """Returns exit code, output and errors of a command that gets Ctrl-C at each "ready"."""
    process = processes.python("-c", WORK.format(work=work))
    for _ in range(presses):
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("work", "presses", "output"),
    [
        ("clean", 1, "cleaned\n"),
        ("converted", 1, ""),
        ("swallowed", 2, ""),
        ("executed", 1, ""),
        ("deleted", 2, ""),
    ],
)
def test_command_interrupted_by_ctrl_c_prints_one_line(work, presses, output):
    assert run_with_presses(work, presses) == (130, output, "interrupted\n")


def test_resumable_command_after_ctrl_c_has_time_to_end_its_processes():
    code, _, errors = run_with_presses("resumed", 1)
    assert code == 75
    assert errors.count("\n") == 1


def test_ctrl_c_during_shutdown_does_not_change_the_exit_code():
    assert run_with_presses("late", 0) == (0, "", "")


def test_command_with_an_error_and_no_ctrl_c_prints_the_traceback():
    code, _, errors = run_with_presses("lambda: 1 / 0", 0)
    assert code == 1
    assert errors.startswith("Traceback")


def test_workers_interrupted_by_ctrl_c_print_no_traceback(tmp_path):
    words = [
        "--from=synthetic",
        "--num_examples=4000",
        "--per_shard=100",
        "--workers=2",
        f"--to={tmp_path}/to",
    ]
    process = processes.python(
        "-m", "hybrid_imagenet", "data", "prepare", *words, start_new_session=True
    )
    try:
        while len(processes.children(process.pid)) < 2:
            assert process.poll() is None
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=30)[1]
        assert process.returncode == 130
    finally:
        process.kill()
