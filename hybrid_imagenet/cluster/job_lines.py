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

from hybrid_imagenet.errors import printable

JOB_VARIABLE = "HYBRID_IMAGENET_JOB"
"""Environment variable that holds the random word of the job."""
UNSAVED = "unsaved"
"""Last word of the line of `notify_exit` if there was nothing to save."""
_JOB_WORD = re.compile(r"[0-9a-f]{32}")
_PROGRAM_END = re.compile(rb" left (\d{1,6}) of (\d{1,6}) on (\S{1,255})\n?")
_FAILURE = re.compile(
    rb" failed (?P<rank>\d{1,6}) on (?P<host>\S{1,255}) (?P<code>\d{1,3}) (?P<kind>error|exit)"
    rb"\t(?P<reason>[^\n]*)\n?"
)
_SAVED_RUN = re.compile(rb" (?P<kind>saved|restored|run)\t(?P<directory>[^\n]*)\n?")
# The line of a failure is shorter than the number of bytes that a pipe takes at once.
_MAX_REASON_LENGTH = 600
# Directories of the runs that this process has recorded.
_announced_runs: list[str] = []


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


class RankFailure(NamedTuple):
    """A rank whose program has failed.

    Attributes:
      rank: The rank.
      host: Name of its host.
      code: Its exit code.
      reason: What has happened, as the continuation of "rank 1 on node2".
      is_exit: Whether the program has called `sys.exit`; otherwise it has raised an exception.
    """

    rank: int
    host: str
    code: int
    reason: str
    is_exit: bool = False

    def __str__(self) -> str:
        """Returns the line for the user."""
        return f"rank {self.rank} on {self.host} {self.reason}"


class SavedRun(NamedTuple):
    """A saved state from which the training of a rank can continue.

    Attributes:
      kind: "saved" or "restored" for a checkpoint of `fit`; "run" for a run of the program.
      directory: Directory of the run; "" for `fit`.
    """

    kind: str
    directory: str


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
            os.write(2, os.fsencode(f"{line}\n"))


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


def notify_failure(failure: RankFailure) -> None:
    """Notifies the supervisor that the program of this rank has failed."""
    kind = "exit" if failure.is_exit else "error"
    reason = printable(failure.reason)[:_MAX_REASON_LENGTH]
    notify_supervisor(f"failed {failure.rank} on {failure.host} {failure.code} {kind}\t{reason}")


def parse_failure(line: bytes) -> RankFailure | None:
    """Parses a line of `notify_failure` without its job word; None for any other line."""
    match = _FAILURE.fullmatch(line)
    if match is None:
        return None
    return RankFailure(
        rank=int(match["rank"]),
        host=match["host"].decode(errors="replace"),
        code=int(match["code"]),
        reason=match["reason"].decode(errors="replace"),
        is_exit=match["kind"] == b"exit",
    )


def notify_checkpoint(*, restored: bool = False) -> None:
    """Notifies the supervisor that `fit` has saved or restored a checkpoint.

    The supervisor then prints the command that continues, if the job fails.
    """
    notify_supervisor("restored\t" if restored else "saved\t")


def notify_run(directory: str) -> None:
    """Notifies the supervisor that the training program records its run in a directory."""
    _announced_runs.append(directory)
    notify_supervisor(f"run\t{directory}")


def announced_run() -> str:
    """Returns the directory of the last `notify_run` in this process, or ""."""
    return _announced_runs[-1] if _announced_runs else ""


def parse_saved_run(line: bytes) -> SavedRun | None:
    """Parses a line of `notify_checkpoint` or `notify_run`; None for any other line."""
    match = _SAVED_RUN.fullmatch(line)
    if match is None:
        return None
    return SavedRun(match["kind"].decode(), os.fsdecode(match["directory"]))
