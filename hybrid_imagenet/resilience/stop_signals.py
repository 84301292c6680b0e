"""Takes requests to stop, from the first line of a program to its end.

Ctrl-C, SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 (a scheduler's warning) each ask for a stop.
Before the first step there is nothing to save: the process ends at once, even inside of a library
that waits for other ranks. From the first step on, a request is kept until all ranks follow it
(`training.loop`). A second SIGINT or SIGTERM prints how the run ends; a third ends it at once.
SIGHUP and SIGUSR1 never do: a closing terminal sends SIGHUP twice, and the supervisor of a job may
repeat SIGUSR1.

A thread takes the requests, so that they are answered within a second while a library waits or
compiles.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from hybrid_imagenet.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from hybrid_imagenet.resilience import exit_code
from hybrid_imagenet.resilience.launcher import launcher_rank
from hybrid_imagenet.startup import STARTUP_PROGRESS

# SIGUSR1 is the one that mpirun passes on to the ranks without killing them a second later.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_HURRY = (signal.SIGINT, signal.SIGTERM)
_IGNORABLE = (
    signal.SIGINT,
    signal.SIGHUP,
)  # what nohup, or a shell for jobs in its background, has switched off
_PRINTING = 0.5  # seconds that a line may take: a terminal that was stopped by Ctrl-S takes none

UNSAVED = "stopped before the first step: nothing new to save"


def end_at_once(number: int) -> None:
    """Ends the process with the code of a signal."""
    os._exit(128 + number)


class Requests:
    """Keeps the requests that signals have made of this process.

    Attributes:
      stop: the work is to be stopped.
      first: the signal that asked for it; 0 before.
      forced: the signal that ended the work at once; 0 before.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.stop = False
        self.first = self.forced = 0
        self._ask: Callable[[], None] | None = None  # None before the work has started
        self._force: Callable[[int], None] = end_at_once
        self._answer = ""
        self._warned = self._temporary = False
        self._before: dict[int, object] = {}
        self._pipe: socket.socket | None = None
        self._fd_before = -1
        self._thread = threading.current_thread()

    def install(self) -> None:
        """Takes the signals from now on; does nothing outside the main thread, or a second time."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        reader, self._pipe = socket.socketpair()
        self._pipe.setblocking(False)
        self._thread = threading.Thread(
            target=self._listen, args=(reader,), name="signals", daemon=True
        )
        self._thread.start()
        # Python calls its handlers only between two of its own steps; it writes to this descriptor
        # at once.
        self._fd_before = signal.set_wakeup_fd(self._pipe.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if number not in _IGNORABLE or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: None)

    def begin(
        self,
        ask: Callable[[], None] = lambda: None,
        force: Callable[[int], None] = end_at_once,
        answer: str = "the run saves after the current step and ends",
    ) -> None:
        """Keeps requests from now on, as the work has started; installs for the time of the work if
        `install` did not.

        Args:
          ask: called once, at the first request, by another thread.
          force: called with the number of the signal that ends the work at once, by another thread.
          answer: printed after the first request.
        """
        self._temporary = self._temporary or not self._before
        self.install()
        self._force, self._answer, self._ask = force, answer, ask

    def end(self) -> None:
        """Ends what `begin` began; in a program that has called `install`, requests are still
        kept.
        """
        if not self._temporary:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._pipe is not None:
            signal.set_wakeup_fd(self._fd_before)
            self._pipe.close()
            self._thread.join()
        self._clear()

    def ignore(self) -> None:
        """Ignores the signals from now on, as all is done: Python's own end would let them end it
        with their code.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    self._take(signal.Signals(number))
        reader.close()

    def _take(self, number: signal.Signals) -> None:
        now = (
            ""
            if STARTUP_PROGRESS.finished.is_set() or not STARTUP_PROGRESS.stage[0]
            else f" (now {STARTUP_PROGRESS.stage[0]})"
        )
        self.first = self.first or number
        if self._ask is None:
            self._leave()
        elif not self.stop:
            self.stop = True
            self._ask()
            _tell(f"{number.name}: {self._answer}{now}")
        elif number in _HURRY and not self._warned:
            self._warned = True
            _tell(
                f"{number.name}: still waiting to save{now}; one more ends the run at once, without"
                " saving"
            )
        elif number in _HURRY:
            self.forced = number
            _tell(f"{number.name}: ended at once; what was not saved is lost")
            self._force(number)

    def unsaved_code(self) -> int:
        """Returns the exit code if there was nothing to save at the first request."""
        return EXIT_INTERRUPTED if self.first == signal.SIGINT else EXIT_PREEMPTED

    def _leave(self) -> None:
        code = self.unsaved_code()
        exit_code.announce(code, saved=False)
        _tell(UNSAVED)
        os._exit(code)


def _tell(line: str) -> None:
    """Prints on rank 0 of a job without a supervisor, or in the supervisor."""
    if launcher_rank() == 0 and exit_code.JOB_VARIABLE not in os.environ:
        _print(line)


def _print(line: str) -> None:
    """Prints a line; one that cannot be printed in time is dropped."""

    def write() -> None:
        with contextlib.suppress(Exception), STARTUP_PROGRESS.hidden():
            print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_PRINTING)


REQUESTS = Requests()  # signals come to the process, not to a part of it
