"""Shows on one rank what a start is doing, stage by stage, and how long each stage took.

Any package may import it, since a start runs through many. Prints nothing until the program opens
it, so `hi` is quiet.
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
"""When the command began that has started the ranks, and on which host (`this_moment`)."""
LAUNCHING = "starting the ranks"
_LONGEST = 3600.0  # seconds for which a launcher's word counts: an older one is another command's
_TICK = 0.5


class StartupProgress:
    """Shows the stages of a start: a line that is rewritten on a terminal, a line for each
    elsewhere.

    Attributes:
      stage: the stage under way and when it began (`time.monotonic`), on every rank, shown or not.
      over: set once the first step is done, or the start has failed.
    """

    def __init__(self) -> None:
        self.stage, self.finished = ("", time.monotonic()), threading.Event()
        self._stream: TextIO | None = None
        self._lock = threading.Lock()

    def open(self, title: str, stream: TextIO, *, terminal: bool) -> None:
        """Begins, with the title of the run."""
        self._stream, self._terminal = stream, terminal
        self._took: dict[str, float] = {}
        self._stage, self._closed = "", threading.Event()
        self._time = clock()
        self._began = command_start(self._time)
        if self._began < self._time:
            self._took[LAUNCHING] = self._time - self._began
        self._write(title)
        if terminal:
            threading.Thread(target=self._tick, name="stages", daemon=True).start()

    def begin(self, stage: str) -> None:
        """Ends the stage before and shows this one."""
        self.stage = stage, time.monotonic()
        if self._stream is None:
            return
        self._end()
        with self._lock:
            self._stage = stage
            if not self._terminal:
                self._write(f"{stage} ...")

    def finish(self) -> None:
        """Ends the start: the first step is done."""
        self.finished.set()
        if self._stream is None:
            return
        self._end()
        with self.hidden():
            self._closed.set()
        parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self._took.items())
        self._write(f"first step after {clock() - self._began:.1f} s: {parts}")
        self._stream = None

    def close(self) -> None:
        """Ends the start without a first step."""
        self.finished.set()
        if self._stream is not None:
            with self.hidden():
                self._closed.set()
            self._stream = None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Clears the line of a terminal for what is printed inside."""
        with self._lock:
            if self._stream is not None and self._terminal and not self._closed.is_set():
                self._stream.write("\r\x1b[K")
                self._stream.flush()
            yield

    def _end(self) -> None:
        now = clock()
        if self._stage:
            self._took[self._stage] = self._took.get(self._stage, 0.0) + now - self._time
        self._time = now

    def _tick(self) -> None:
        closed = self._closed
        while not closed.wait(_TICK):
            with self._lock:
                if self._stage and not closed.is_set() and self._stream is not None:
                    self._stream.write(f"\r\x1b[K{self._stage} ... {clock() - self._time:.0f} s")
                    self._stream.flush()

    def _write(self, line: str) -> None:
        assert self._stream is not None
        self._stream.write(printable(line) + "\n")
        self._stream.flush()


STARTUP_PROGRESS = StartupProgress()
"""Of this process."""


def is_terminal_output(progress: str, ranks: int) -> bool:
    """Whether what rank 0 writes to standard output comes to a terminal, under --progress.

    Open MPI gives every rank a pseudo-terminal, whatever it writes to itself; so a rank believes in
    a terminal only if the launcher, which sees the real one, says so.
    """
    if progress != "auto":
        return progress == "live"
    if ranks > 1 or "HYBRID_IMAGENET_TERMINAL" in os.environ:
        return os.environ.get("HYBRID_IMAGENET_TERMINAL", "0") != "0"
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def command_start(now: float) -> float:
    """Returns when the command that started the ranks began, on the clock of this host (`clock`).

    Args:
      now: returned if the command began on another host, or if it is not known when.
    """
    began, _, boot = os.environ.get(COMMAND_START_VARIABLE, "").partition("@")
    try:
        seconds = now - float(began)
    except ValueError:
        return now
    return float(began) if boot == _boot() and 0 <= seconds < _LONGEST else now


def clock() -> float:
    """Returns the seconds since this host has booted.

    All processes of a host share this clock, and unlike the clock of the day it never jumps. The
    clocks of two hosts have nothing in common.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def timestamp() -> str:
    """Returns the present time as a value for `COMMAND_START_VARIABLE`."""
    return f"{clock():.2f}@{_boot()}"


def _boot() -> str:
    """Returns what all processes of a running host share and no two hosts do, or "" where Linux
    does not tell it.
    """
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def record_command_start() -> None:
    """Notes for the ranks that the command that starts them has begun."""
    os.environ.setdefault(COMMAND_START_VARIABLE, timestamp())
