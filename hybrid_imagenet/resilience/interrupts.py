"""Ends a command by one line after Ctrl-C, wherever it is; training has `stop_signals` instead."""

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

_CLEANING = 3.0  # seconds for a command to clean up


def ended_by_one_line(work: Callable[[], int]) -> int:
    """Returns what the work returns, or 130 and a line after Ctrl-C.

    The first Ctrl-C raises KeyboardInterrupt in the work, so that it cleans up. The process ends at
    once 3 s later if the work does not end by then, or with the second.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    unwound = threading.Event()

    def end_unwound() -> None:
        if unwound.is_set():
            _end()

    # Called after all other functions of atexit. An interrupt inside of `exec` lets Python itself
    # end by SIGINT.
    atexit.register(end_unwound)
    try:
        code = work()
        _ending.cancel()
    except BaseException:
        if not interrupted():
            raise
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        code = EXIT_INTERRUPTED
        unwound.set()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # all is done: Python's own end would let it end the process
    return code


def interrupted() -> bool:
    """Whether Ctrl-C has come: some libraries turn KeyboardInterrupt into an error of their own."""
    return _ending.ident is not None


def _interrupt(number: int, frame: FrameType | None) -> None:
    if interrupted():
        _end()
    _ending.start()
    raise KeyboardInterrupt


def _unraisable(error: Any) -> None:
    if (
        not interrupted()
    ):  # a destructor or a callback that the interrupt has met would print a traceback
        sys.__unraisablehook__(error)


def _end() -> None:
    """Ends the process without waiting for threads."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


_ending = threading.Timer(_CLEANING, _end)
_ending.daemon = True
