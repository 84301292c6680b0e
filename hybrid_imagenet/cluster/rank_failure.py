"""Reports the failure of a rank, and ends its process at once.

A rank that fails prints one line with its number and host, then its traceback. The supervisor of
the job repeats the line at the end. The process does not run exit handlers, because those of
TensorFlow and MPI wait for the other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import socket
import sys
import threading
from typing import NoReturn

from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.cluster.job_lines import RankFailure
from hybrid_imagenet.errors import UserError, printable

# How long files may take to be written, such as those of a server that does not answer.
_FLUSH_SECONDS = 5.0
# How long the other ranks may work on after one has called `sys.exit` with an error code.
_EXIT_GRACE_SECONDS = 20.0
_MAX_SUMMARY_LENGTH = 300
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")
# Lines with which the messages of Keras and TensorFlow begin. The cause follows.
_INTRODUCTION = re.compile(r"(Exception encountered when calling .*|.*:)$")
_GRAPH_ERROR = "Graph execution error:"
_NESTED_ERROR = re.compile(r"^\w+(?:Error|Exception): .+", re.MULTILINE)


def summary(error: BaseException) -> str:
    """Returns an error as one line, such as "ValueError: no such class".

    The messages of Keras and TensorFlow have many lines. The line that names the cause is chosen.
    """
    if isinstance(error, UserError):
        return str(error)
    text = _ESCAPE_SEQUENCE.sub("", str(error))
    if text.startswith(_GRAPH_ERROR) and (causes := _NESTED_ERROR.findall(text)):
        text = causes[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = lines[0] if lines else ""
    if len(lines) > 1 and _INTRODUCTION.fullmatch(message):
        message += f" {lines[1]}"
    name = type(error).__name__
    line = printable(f"{name}: {message}" if message else name)
    if len(line) > _MAX_SUMMARY_LENGTH:
        line = f"{line[:_MAX_SUMMARY_LENGTH]} ..."
    return line


def report_error(rank: int, error: BaseException, code: int) -> None:
    """Prints which rank has failed and why, before its traceback, and notifies the supervisor.

    Args:
      rank: This rank.
      error: What has ended its program.
      code: Its exit code.
    """
    failure = RankFailure(rank, socket.gethostname(), code, f"failed: {summary(error)}")
    print(failure, file=sys.stderr, flush=True)
    job_lines.notify_failure(failure)


def report_exit(rank: int, code: int, message: str = "") -> None:
    """Notifies the supervisor that the program of this rank calls `sys.exit` with an error code.

    The other ranks may still save, so the process then ends normally. But in its exit handlers it
    may wait for ranks that wait for it, so it has limited time.

    Args:
      rank: This rank.
      code: The exit code.
      message: The text that the program has passed instead of a code.
    """
    suffix = f": {message}" if message else ""
    reason = f"exited with code {code} (sys.exit){suffix}"
    job_lines.notify_failure(RankFailure(rank, socket.gethostname(), code, reason, is_exit=True))
    timer = threading.Timer(_EXIT_GRACE_SECONDS, exit_at_once, (code,))
    timer.daemon = True
    timer.start()


def exit_at_once(code: int) -> NoReturn:
    """Writes the buffers of open files, and ends this process without exit handlers."""
    timer = threading.Timer(_FLUSH_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    try:
        for candidate in (sys.stdout, sys.stderr, *gc.get_objects()):
            # The class of a proxy object may be computed, so `isinstance` could run code.
            if issubclass(type(candidate), (io.TextIOWrapper, io.BufferedWriter)):
                with contextlib.suppress(Exception):
                    candidate.flush()
        os._exit(code)
    finally:
        # Tests replace `os._exit`.
        timer.cancel()
