"""Shows what a run is doing until its first step, and how long each stage took.

One rank shows it. Every package may import this module, because starting a run involves many of
them. Nothing is printed until the program opens the display, so the library is quiet.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from hybrid_imagenet.errors import printable

COMMAND_START_VARIABLE = "HYBRID_IMAGENET_STARTED"
"""Environment variable with the time at which the command that starts the ranks began.

It also names the host (`timestamp`).
"""
LAUNCHING = "starting the ranks"
# An older time in COMMAND_START_VARIABLE is from another command.
_MAX_LAUNCH_SECONDS = 3600.0
_REFRESH_SECONDS = 0.5
_CLEAR_LINE = "\r\x1b[K"


class StartupProgress:
    """Shows the stages of the start of a run.

    On a terminal, one line is rewritten. Elsewhere, each stage has its own line.

    Attributes:
      stage: The current stage and when it began (`time.monotonic`). It is set on every rank, even
        if nothing is shown.
      finished: Set once the first step is done, or the start failed.
    """

    def __init__(self) -> None:
        self.stage = ("", time.monotonic())
        self.finished = threading.Event()
        self._stream: TextIO | None = None
        self._lock = threading.Lock()

    def open(self, title: str, stream: TextIO, *, terminal: bool) -> None:
        """Begins to show stages.

        Args:
          title: The first line, which describes the run.
          stream: Stream to which lines are written.
          terminal: Whether `stream` is a terminal, on which a line can be rewritten.
        """
        self._stream = stream
        self._terminal = terminal
        self._seconds_by_stage: dict[str, float] = {}
        self._shown_stage = ""
        self._closed = threading.Event()
        self._stage_start = clock()
        self._command_start = command_start(self._stage_start)
        if self._command_start < self._stage_start:
            self._seconds_by_stage[LAUNCHING] = self._stage_start - self._command_start
        self._write(title)
        if terminal:
            threading.Thread(target=self._refresh, name="stages", daemon=True).start()

    def begin(self, stage: str) -> None:
        """Ends the previous stage and shows this one."""
        self.stage = (stage, time.monotonic())
        if self._stream is None:
            return
        self._end_stage()
        with self._lock:
            self._shown_stage = stage
            if not self._terminal:
                self._write(f"{stage} ...")

    def finish(self) -> None:
        """Shows how long each stage took, because the first step is done."""
        self.finished.set()
        if self._stream is None:
            return
        self._end_stage()
        with self.hidden():
            self._closed.set()
        stages = ", ".join(
            f"{stage} {seconds:.1f} s" for stage, seconds in self._seconds_by_stage.items()
        )
        self._write(f"first step after {clock() - self._command_start:.1f} s: {stages}")
        self._stream = None

    def close(self) -> None:
        """Stops showing stages without a first step."""
        self.finished.set()
        if self._stream is not None:
            with self.hidden():
                self._closed.set()
            self._stream = None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Clears the line on a terminal and does not rewrite it while the block prints."""
        with self._lock:
            if self._stream is not None and self._terminal and not self._closed.is_set():
                self._stream.write(_CLEAR_LINE)
                self._stream.flush()
            yield

    def _end_stage(self) -> None:
        end = clock()
        if self._shown_stage:
            seconds = self._seconds_by_stage.get(self._shown_stage, 0.0)
            self._seconds_by_stage[self._shown_stage] = seconds + end - self._stage_start
        self._stage_start = end

    def _refresh(self) -> None:
        closed = self._closed
        while not closed.wait(_REFRESH_SECONDS):
            with self._lock:
                if self._shown_stage and not closed.is_set() and self._stream is not None:
                    seconds = clock() - self._stage_start
                    self._stream.write(f"{_CLEAR_LINE}{self._shown_stage} ... {seconds:.0f} s")
                    self._stream.flush()

    def _write(self, line: str) -> None:
        assert self._stream is not None
        self._stream.write(printable(line) + "\n")
        self._stream.flush()


STARTUP_PROGRESS = StartupProgress()
"""The start of the run in this process."""


def is_terminal_output(progress: str, ranks: int) -> bool:
    """Returns whether the standard output of rank 0 appears on a terminal.

    Open MPI gives every rank a pseudo-terminal, whatever it writes to itself. So a rank assumes a
    terminal only if the launcher, which sees the real one, reports it.

    Args:
      progress: --progress; only "auto" looks at the environment.
      ranks: Number of ranks of the run.
    """
    if progress != "auto":
        return progress == "live"
    if ranks > 1 or "HYBRID_IMAGENET_TERMINAL" in os.environ:
        return os.environ.get("HYBRID_IMAGENET_TERMINAL", "0") != "0"
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def command_start(default: float) -> float:
    """Returns when the command that started the ranks began, on the clock of this host (`clock`).

    Args:
      default: Returned if the command began on another host, or if the time is unknown.
    """
    start, _, boot_id = os.environ.get(COMMAND_START_VARIABLE, "").partition("@")
    try:
        seconds = default - float(start)
    except ValueError:
        return default
    if boot_id != _boot_id() or not 0 <= seconds < _MAX_LAUNCH_SECONDS:
        return default
    return float(start)


def record_command_start() -> None:
    """Stores in the environment, for the ranks, when the command that starts them began."""
    os.environ.setdefault(COMMAND_START_VARIABLE, timestamp())


def timestamp() -> str:
    """Returns the current time as a value for `COMMAND_START_VARIABLE`."""
    return f"{clock():.2f}@{_boot_id()}"


def clock() -> float:
    """Returns the seconds since this host booted.

    All processes of a host share this clock. Unlike the time of day it never jumps. The clocks of
    two hosts cannot be compared.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> str:
    """Returns an identifier of this host since it booted, or "" if Linux does not have one."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
