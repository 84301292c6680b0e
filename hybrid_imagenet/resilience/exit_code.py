"""Sends a rank's exit code to the supervisor, because the launcher may hide it.

mpirun and horovodrun pass exit codes on in a few cases only, but they carry what ranks print over
any network. So a rank writes its exit code to standard error, in a line that begins with the secret
word of the job (`comm.job_lines`). The supervisor removes these lines from what the user sees.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import NamedTuple

from hybrid_imagenet.comm import job_lines
from hybrid_imagenet.comm.job_lines import JOB_VARIABLE
from hybrid_imagenet.errors import EXIT_STALLED

__all__ = ["JOB_VARIABLE", "RankExit", "exit_stalled", "notify_exit", "parse_exit"]

_PRINT_SECONDS = 5.0
_UNSAVED = "unsaved"
_EXIT_LINE = re.compile(rb" ends (\d{1,3})\b( %s)?" % _UNSAVED.encode())


class RankExit(NamedTuple):
    """The end of a rank, as the rank itself reported it.

    Attributes:
      code: its exit code.
      saved: false if a signal ended it before there was something to save.
    """

    code: int
    saved: bool


def notify_exit(code: int, environ: Mapping[str, str] | None = None, *, saved: bool = True) -> None:
    """Sends this rank's exit code to its supervisor; does nothing if it has none.

    Args:
      code: the exit code.
      environ: variables of the process (default: `os.environ`).
      saved: false if a signal ends the rank before there was something to save.
    """
    suffix = "" if saved else f" {_UNSAVED}"
    job_lines.notify_supervisor(f"ends {code}{suffix}", environ)


def exit_stalled(message: str) -> None:
    """Prints a line, notifies the supervisor and ends this process with EXIT_STALLED.

    The process ends after some seconds even if its standard error is blocked.
    """
    timer = threading.Timer(_PRINT_SECONDS, os._exit, (EXIT_STALLED,))
    timer.daemon = True
    timer.start()
    print(message, file=sys.stderr, flush=True)
    notify_exit(EXIT_STALLED)
    os._exit(EXIT_STALLED)


def parse_exit(text: bytes) -> RankExit | None:
    """Returns the end that `notify_exit` has reported, or None if this is another line.

    Args:
      text: a line of standard error after the job's word.
    """
    match = _EXIT_LINE.match(text)
    if match is None:
        return None
    return RankExit(int(match[1]), saved=not match[2])
