"""Sends lines to the supervisor of a job through standard error, which reaches it from any host.

`hybrid-imagenet run` and the launch scripts give each job a random word in the environment. A line
that begins with this word is for the supervisor (`resilience.supervisor`), which removes it from
the output that users see.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

JOB_VARIABLE = "HYBRID_IMAGENET_JOB"
"""Environment variable that holds the random word of the job."""
UNSAVED = "unsaved"
"""Last word of the line of `notify_exit` if there was nothing to save."""
_JOB_WORD = re.compile(r"[0-9a-f]{32}")
_PROGRAM_END = re.compile(rb" left (\d{1,6}) of (\d{1,6}) on (\S{1,255})\n?")


class ProgramEnd(NamedTuple):
    """A rank whose program has ended without an error.

    Attributes:
      rank: The rank.
      size: Number of ranks of the job.
      host: Name of the rank's host.
    """

    rank: int
    size: int
    host: str


def notify_supervisor(text: str, environ: Mapping[str, str] | None = None) -> None:
    """Writes a line for the supervisor of this rank; does nothing without a supervisor.

    Args:
      text: The line without the word of the job.
      environ: Environment variables; those of this process if None.
    """
    line = supervisor_line(text, environ)
    if line:
        # Writing fails if the supervisor has ended. Then the line is not needed.
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())


def supervisor_line(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Returns a line for the supervisor of this rank, or "" without a supervisor.

    Args:
      text: The line without the word of the job.
      environ: Environment variables; those of this process if None.
    """
    environ = os.environ if environ is None else environ
    job_word = environ.get(JOB_VARIABLE, "")
    return f"{job_word} {text}" if _JOB_WORD.fullmatch(job_word) else ""


def notify_exit(code: int, environ: Mapping[str, str] | None = None, *, saved: bool = True) -> None:
    """Sends this rank's exit code to its supervisor; does nothing without one.

    The supervisor reads the line by `resilience.exit_code.parse_exit`.

    Args:
      code: The exit code.
      environ: Environment variables; those of this process if None.
      saved: False if a signal ends the rank before there was something to save.
    """
    suffix = "" if saved else f" {UNSAVED}"
    notify_supervisor(f"ends {code}{suffix}", environ)


def notify_program_end(rank: int, size: int) -> None:
    """Notifies the supervisor that the program of this rank ends without an error."""
    notify_supervisor(f"left {rank} of {size} on {socket.gethostname()}")


def parse_program_end(line: bytes) -> ProgramEnd | None:
    """Parses a line of `notify_program_end` without its job word; None for any other line."""
    match = _PROGRAM_END.fullmatch(line)
    if match is None:
        return None
    return ProgramEnd(int(match[1]), int(match[2]), match[3].decode(errors="replace"))
