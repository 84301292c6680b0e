"""Sends a rank's exit code to the supervisor, because the launcher may hide it.

mpirun and horovodrun pass exit codes on in a few cases only, but they carry what ranks print over
any network. So a rank writes its exit code to standard error, in a line that begins with the secret
word of the job (`cluster.job_lines`). The supervisor removes these lines from what the user sees.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import NamedTuple

from hybrid_imagenet.cluster.job_lines import JOB_VARIABLE, UNSAVED, notify_exit
from hybrid_imagenet.errors import EXIT_STALLED

__all__ = ["JOB_VARIABLE", "RankExit", "end_process", "exit_stalled", "notify_exit", "parse_exit"]

_PRINT_SECONDS = 5.0
_EXIT_LINE = re.compile(rb" ends (\d{1,3})\b( %s)?" % UNSAVED.encode())


class RankExit(NamedTuple):
    """The end of a rank, as the rank itself reported it.

    Attributes:
      code: Its exit code.
      saved: False if a signal ended it before there was something to save.
    """

    code: int
    saved: bool


def exit_stalled(message: str) -> None:
    """Ends this process with EXIT_STALLED, as `end_process`."""
    end_process(message, EXIT_STALLED)


def end_process(message: str, code: int) -> None:
    """Prints a line, notifies the supervisor and ends this process, from any thread.

    The process ends after some seconds even if its standard error is blocked.

    Args:
      message: The line.
      code: The exit code.
    """
    timer = threading.Timer(_PRINT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    print(message, file=sys.stderr, flush=True)
    notify_exit(code)
    os._exit(code)


def parse_exit(text: bytes) -> RankExit | None:
    """Returns the end that `notify_exit` has reported, or None if this is another line.

    Args:
      text: A line of standard error after the job's word.
    """
    match = _EXIT_LINE.match(text)
    if match is None:
        return None
    return RankExit(int(match[1]), saved=not match[2])
