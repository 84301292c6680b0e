"""Kills a process that stops giving signs of life (`python -m hybrid_imagenet.resilience.reaper PROCESS SECONDS`).

A rank that is stopped as a whole cannot end itself, and an elastic launcher waits for it for ever. So each elastic rank
has such a small process beside it, to which its watchdog writes: b"+" is a sign of life, b"-" asks for patience until
the next one. When the rank ends, so does its guardian.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_LATE = 5.0  # a guardian that was late by so many seconds was stopped itself, and begins to wait anew


class Guardian:
    """Starts the process that kills a silent rank, and gives it the rank's signs of life."""

    def __init__(self, seconds: float):
        """Starts the process; it kills this rank after `seconds` without a sign of life."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybrid_imagenet.resilience.reaper", str(os.getpid()), str(seconds)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C on the terminal is not for it
        )

    def alive(self) -> None:
        """Gives a sign of life."""
        self._write(b"+")

    def rest(self) -> None:
        """Announces a silence that is no fault, during which this process is not killed."""
        self._write(b"-")

    def _write(self, sign: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: the rank goes on without it
            os.write(self._process.stdin.fileno(), sign)  # type: ignore[union-attr]


def watch(process: int, seconds: float, signs: int) -> None:
    """Reads signs of life from a file descriptor until it is closed; kills the process if they stop."""
    waiting = False
    while True:
        began = time.monotonic()
        ready, _, _ = select.select([signs], [], [], seconds if waiting else None)
        if ready:
            data = os.read(signs, 1 << 12)
            if not data:
                return
            waiting = data.endswith(b"+")
        elif time.monotonic() - began < seconds + _LATE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            what = f"process {process} gave no sign of life for {seconds:g} s: it was killed"
            with contextlib.suppress(OSError):  # nobody listens any more
                os.write(2, f"error: {what}\n".encode())
            return


def main(arguments: Sequence[str]) -> None:
    """Kills the process in the first argument once it is silent for too long."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(arguments[0]), float(arguments[1]), sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
