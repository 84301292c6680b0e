"""An error that nothing catches ends a program with the right exit code."""

import os
import signal
import subprocess
import sys

import pytest

from hybrid_imagenet.cluster import rank_failure
from hybrid_imagenet.cluster.job_lines import JOB_VARIABLE
from hybrid_imagenet.errors import UserError

WORD = "0123456789abcdef" * 2
# The part of `hi.init()` that needs no TensorFlow.
PROGRAM = """\
import atexit, sys
from hybrid_imagenet import errors
from hybrid_imagenet.cluster import environment
from hybrid_imagenet.comm import process

process._state.placement = environment.Placement(rank=0, size={size})
atexit.register(print, "exit handlers ran")
process.install_excepthook()
log = open({log!r}, "w")
log.write("last line")
raise {error}
"""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("errors.UserError('wrong')", 2),
        ("errors.NumericsError('wrong')", 3),
        ("ValueError('wrong')", 1),
    ],
)
def test_uncaught_error_names_the_rank_and_ends_with_its_exit_code(error, code, size, tmp_path):
    done = run(error, size, tmp_path)
    assert done.returncode == code
    assert f"{WORD} ends {code}\n" in done.stderr
    if size == 2 and "Numerics" in error:
        # All ranks raise it, and rank 0 prints one line.
        assert done.stderr.startswith("error: wrong\n")
    else:
        first, notification, traceback = done.stderr.splitlines()[:3]
        reason = "failed: " + ("ValueError: wrong" if "Value" in error else "wrong")
        assert first.startswith("rank 0 on ")
        assert first.endswith(reason)
        assert notification.startswith(f"{WORD} failed 0 on ")
        assert notification.endswith(f" {code} error\t{reason}")
        assert traceback.startswith("Traceback ")
        assert ": wrong\n" in done.stderr
    # Exit handlers of TensorFlow and MPI would wait for the other rank, but files are written.
    assert ("exit handlers ran" in done.stdout) == (size == 1)
    if size == 2:
        assert (tmp_path / "log").read_text() == "last line"


def test_uncaught_keyboard_interrupt_ends_by_its_signal(tmp_path):
    done = run("KeyboardInterrupt", 1, tmp_path)
    assert done.returncode == -signal.SIGINT
    assert " ends " not in done.stderr


def run(error, size, folder):
    program = PROGRAM.format(error=error, size=size, log=str(folder / "log"))
    environment = os.environ | {JOB_VARIABLE: WORD}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


GRAPH_ERROR = """Graph execution error:

Detected at node functional_1/late_1/PyFunc defined at (most recent call last):
  File "nets.py", line 24, in call

ValueError: no entry
Traceback (most recent call last):

ValueError: no entry


\t [[{{node functional_1/late_1/PyFunc}}]] [Op:__inference__update_1638]"""
KERAS_ERROR = (
    "Exception encountered when calling Late.call().\n\n\x1b[1mno shape\x1b[0m\n\nArguments: x"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (ValueError(), "ValueError"),
        (KeyError("a"), "KeyError: 'a'"),
        (UserError("Use b."), "Use b."),
        (RuntimeError(GRAPH_ERROR), "RuntimeError: ValueError: no entry"),
        (
            TypeError(KERAS_ERROR),
            "TypeError: Exception encountered when calling Late.call(). no shape",
        ),
        (OSError("s3://name:word@host/x\x1b[2J"), "OSError: s3://***@host/x\\x1b[2J"),
        (ValueError("x" * 1000), f"ValueError: {'x' * 288} ..."),
    ],
)
def test_summary_is_the_line_that_names_the_cause(error, expected):
    assert rank_failure.summary(error) == expected
