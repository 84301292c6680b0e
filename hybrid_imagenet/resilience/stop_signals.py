"""Turns signals into requests to stop, from the first line of a program to its end.

Ctrl-C, SIGTERM, SIGHUP (a closed terminal) and SIGUSR1 (a scheduler's warning) each ask for a stop.
Before the first step there is nothing to save, so the process ends at once, even inside a library
that waits for other ranks. From the first step on, a request is kept until all ranks follow it
(`step_requests`). A second SIGINT or SIGTERM prints how the run will end; a third one ends
it at once. SIGHUP and SIGUSR1 never do that, because a closing terminal sends SIGHUP twice, and the
supervisor of a job may repeat SIGUSR1.

A thread handles the signals, so that they are answered within a second even while a library waits
or compiles.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection

from hybrid_imagenet.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from hybrid_imagenet.resilience import exit_code
from hybrid_imagenet.resilience.launcher import launcher_rank
from hybrid_imagenet.startup import STARTUP_PROGRESS

# mpirun passes SIGUSR1 on to the ranks without killing them a second later.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The second of these prints a warning, the third ends the work at once.
_FORCING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# nohup, or a shell that starts a job in the background, may have switched these off. Then they
# stay off.
_IGNORABLE_SIGNALS = (signal.SIGINT, signal.SIGHUP)
# Launchers send these to a whole process group. A child of a rank must outlive them, because the
# rank needs its work until it has saved.
_SIGNALS_FOR_RANKS = (signal.SIGHUP, signal.SIGUSR1)
# A terminal that was stopped by Ctrl-S takes no output, so printing has a time limit.
_PRINT_SECONDS = 0.5

UNSAVED = "stopped before the first step: nothing new to save"


def exit_by_signal(number: int) -> None:
    """Ends the process at once with the exit code of a signal."""
    os._exit(128 + number)


class StopRequests:
    """Keeps the requests that signals have made of this process.

    Attributes:
      stop: Whether a stop was requested.
      first_signal: The signal that requested it first; 0 before.
      forced_by: The signal that ended the work at once; 0 before.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.stop = False
        self.first_signal = 0
        self.forced_by = 0
        # None until the work has started.
        self._on_stop: Callable[[], None] | None = None
        self._on_force: Callable[[int], None] = exit_by_signal
        self._announcement = ""
        self._has_warned = False
        # Whether `end` must restore the earlier handlers.
        self._installed_by_begin = False
        self._earlier_handlers: dict[int, object] = {}
        self._earlier_wakeup_fd = -1
        self._wakeup_socket: socket.socket | None = None
        self._thread = threading.current_thread()

    def install(self, signals: Collection[signal.Signals] = SIGNALS) -> None:
        """Starts to handle signals.

        Does nothing outside the main thread, or if it was called before.

        Args:
          signals: Some of `SIGNALS` (default: all of them).
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        if self._earlier_handlers or not is_main_thread:
            return
        reader, self._wakeup_socket = socket.socketpair()
        self._wakeup_socket.setblocking(False)
        self._thread = threading.Thread(
            target=self._listen, args=(reader,), name="signals", daemon=True
        )
        self._thread.start()
        # Python calls its signal handlers only between two bytecode instructions of the main
        # thread, but it writes the signal's number to this descriptor at once.
        self._earlier_wakeup_fd = signal.set_wakeup_fd(
            self._wakeup_socket.fileno(), warn_on_full_buffer=False
        )
        for number in signals:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if not (is_ignored and number in _IGNORABLE_SIGNALS):
                self._earlier_handlers[number] = signal.signal(number, lambda number, frame: None)

    def begin(
        self,
        on_stop: Callable[[], None] = lambda: None,
        on_force: Callable[[int], None] = exit_by_signal,
        announcement: str = "the run saves after the current step and ends",
        signals: Collection[signal.Signals] = SIGNALS,
    ) -> None:
        """Keeps requests from now on, because the work has started.

        Installs the handlers until `end` if `install` was not called before.

        Args:
          on_stop: Called once, at the first request, by another thread.
          on_force: Called by another thread with the number of the signal that ends the work at
            once.
          announcement: Printed after the first request.
          signals: Some of `SIGNALS` (default: all of them).
        """
        if not self._earlier_handlers:
            self._installed_by_begin = True
        self.install(signals)
        self._on_force = on_force
        self._announcement = announcement
        # This comes last, because from here on requests are kept and need the two others.
        self._on_stop = on_stop

    def end(self, *, keep_request: bool = False) -> None:
        """Restores the signal handlers that `begin` replaced.

        Does nothing in a program that has called `install`: it still keeps requests.

        Args:
          keep_request: Whether the work after the next `begin` must follow a request that came too
            late for this work.
        """
        if not self._installed_by_begin:
            return
        request = self.stop, self.first_signal
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._wakeup_socket is not None:
            signal.set_wakeup_fd(self._earlier_wakeup_fd)
            self._wakeup_socket.close()
            self._thread.join()
        self._clear()
        if keep_request:
            self.stop, self.first_signal = request

    def forget(self) -> None:
        """Restores the earlier handlers in a forked child, which must not report its own signals.

        The child shares the socket with its parent, which would take them for its own. Signals that
        are meant for ranks do not end it.
        """
        if self._wakeup_socket is None:
            return
        signal.set_wakeup_fd(-1)
        self._wakeup_socket.close()
        for number, handler in self._earlier_handlers.items():
            if number in _SIGNALS_FOR_RANKS and handler is signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._clear()

    def ignore(self) -> None:
        """Ignores the signals from now on.

        Call it when all work is done. While Python shuts down, a signal would otherwise end the
        process with the signal's exit code instead of the program's.
        """
        for number in self._earlier_handlers:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            for number in numbers:
                if number in self._earlier_handlers:
                    self._handle(signal.Signals(number))
        reader.close()

    def _handle(self, number: signal.Signals) -> None:
        stage, _ = STARTUP_PROGRESS.stage
        activity = ""
        if stage and not STARTUP_PROGRESS.finished.is_set():
            activity = f" (now {stage})"
        self.first_signal = self.first_signal or number
        if self._on_stop is None:
            self._exit_unsaved()
        elif not self.stop:
            self.stop = True
            self._on_stop()
            _print_once_per_job(f"{number.name}: {self._announcement}{activity}")
        elif number in _FORCING_SIGNALS and not self._has_warned:
            self._has_warned = True
            _print_once_per_job(
                f"{number.name}: still waiting to save{activity}; one more ends the run at once,"
                " without saving"
            )
        elif number in _FORCING_SIGNALS:
            self.forced_by = number
            _print_once_per_job(f"{number.name}: ended at once; what was not saved is lost")
            self._on_force(number)

    def unsaved_code(self) -> int:
        """Returns the exit code if there was nothing to save at the first request."""
        return EXIT_INTERRUPTED if self.first_signal == signal.SIGINT else EXIT_PREEMPTED

    def _exit_unsaved(self) -> None:
        code = self.unsaved_code()
        exit_code.notify_exit(code, saved=False)
        _print_once_per_job(UNSAVED)
        os._exit(code)


def _print_once_per_job(line: str) -> None:
    """Prints a line in the supervisor, or on rank 0 if the job has none."""
    if launcher_rank() == 0 and exit_code.JOB_VARIABLE not in os.environ:
        _print_in_time(line)


def _print_in_time(line: str) -> None:
    """Prints a line, but does not wait if standard error is blocked."""

    def write() -> None:
        with contextlib.suppress(Exception), STARTUP_PROGRESS.hidden():
            print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_PRINT_SECONDS)


# A global variable, because signals are sent to the process, not to a part of it.
REQUESTS = StopRequests()
os.register_at_fork(after_in_child=REQUESTS.forget)
