"""Ctrl-C in commands that do not train."""

import signal
import subprocess
import sys

import pytest

from tests.ranks import ROOT
from tests.support import ends

WORK = """
import time
from hybrid_imagenet.resilience.interrupts import ended_by_one_line

def wait():
    print("ready", flush=True)
    time.sleep(60)

class Deleted:
    def __del__(self):
        wait()

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

def deleted():
    Deleted()
    wait()

raise SystemExit(ended_by_one_line({work}))
"""


@pytest.mark.parametrize(
    ("work", "presses", "output"),
    [("clean", 1, "cleaned\n"), ("converted", 1, ""), ("swallowed", 2, ""), ("executed", 1, ""), ("deleted", 2, "")],
)
def test_a_command_ends_with_one_line(work, presses, output):
    process = subprocess.Popen(
        [sys.executable, "-c", WORK.format(work=work)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(presses):
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (output, "interrupted\n")
    assert process.returncode == 130


def test_the_first_moments_of_a_command_too(tmp_path):
    ended = ends.end(ends.Case(("plan",), ends.START, "INT"), tmp_path)
    assert (ended.code, ended.lines) == (130, ("interrupted",))
