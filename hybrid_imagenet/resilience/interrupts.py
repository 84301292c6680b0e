"""Ends a command with one line after Ctrl-C. Training uses `stop_signals` instead."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hybrid_imagenet.errors import EXIT_INTERRUPTED

# How long a command may clean up.
_CLEANUP_SECONDS = 3.0


def run_interruptible(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code, or 130 after Ctrl-C.

    The first Ctrl-C raises KeyboardInterrupt in the command, so that it can clean up. If it has not
    ended 3 s later, or after a second Ctrl-C, the process ends at once.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _on_interrupt)
    sys.unraisablehook = _print_unraisable
    unwound = threading.Event()

    def exit_if_unwound() -> None:
        if unwound.is_set():
            _exit_interrupted()

    # Functions of atexit are called in reverse order, so this one is called last. It is needed
    # because Python ends by SIGINT itself if an interrupt came inside `exec`.
    atexit.register(exit_if_unwound)
    try:
        code = command()
        _exit_timer.cancel()
    except BaseException:
        # Some libraries turn KeyboardInterrupt into an error of another class.
        if not was_interrupted():
            raise
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        code = EXIT_INTERRUPTED
        unwound.set()
    # The command is done. While Python shuts down, Ctrl-C would otherwise end the process with
    # another exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def was_interrupted() -> bool:
    """Returns whether Ctrl-C has come."""
    return _exit_timer.ident is not None


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if was_interrupted():
        _exit_interrupted()
    _exit_timer.start()
    raise KeyboardInterrupt


def _print_unraisable(error: Any) -> None:
    """Prints an error in a destructor or callback, unless Ctrl-C has caused it."""
    if not was_interrupted():
        sys.__unraisablehook__(error)


def _exit_interrupted() -> None:
    """Ends the process without waiting for threads."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


_exit_timer = threading.Timer(_CLEANUP_SECONDS, _exit_interrupted)
_exit_timer.daemon = True
