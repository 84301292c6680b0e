"""An error that nothing catches ends a program with the right exit code."""

import os
import signal
import subprocess
import sys

import pytest

from hybrid_imagenet.comm.job_lines import JOB_VARIABLE

WORD = "0123456789abcdef" * 2
# The part of `hi.init()` that needs no TensorFlow.
PROGRAM = """\
import atexit, sys
from hybrid_imagenet import errors
from hybrid_imagenet.comm import process

atexit.register(process._notify_supervisor_of_exit)
atexit.register(print, "exit handlers ran")
sys.excepthook = process._exit_with_code_of_error(sys.excepthook, ends_at_once={ends_at_once})
raise {error}
"""


@pytest.mark.parametrize("ends_at_once", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("errors.UserError('wrong')", 2),
        ("errors.NumericsError('wrong')", 3),
        ("ValueError('wrong')", 1),
    ],
)
def test_uncaught_error_prints_its_traceback_and_ends_with_its_exit_code(error, code, ends_at_once):
    done = run(error, ends_at_once)
    assert done.returncode == code
    assert done.stderr.startswith("Traceback ")
    assert f": wrong\n{WORD} ends {code}\n" in done.stderr
    assert ("exit handlers ran" in done.stdout) == (not ends_at_once)


def test_uncaught_keyboard_interrupt_ends_by_its_signal():
    done = run("KeyboardInterrupt", False)
    assert done.returncode == -signal.SIGINT
    assert " ends " not in done.stderr


def run(error, ends_at_once):
    program = PROGRAM.format(error=error, ends_at_once=ends_at_once)
    environment = os.environ | {JOB_VARIABLE: WORD}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
