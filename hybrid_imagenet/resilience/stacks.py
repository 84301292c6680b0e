"""Reads the Python stacks of this process's threads from another thread."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import time
import types
from collections.abc import Iterator

MAX_FRAMES = 12
_PACKAGE = "hybrid_imagenet"
_SCRIPT_RUNNER = "resilience/script_runner.py"
# Pauses in seconds between attempts to find a frame (see `FrameWatch.is_running`).
_RETRY_PAUSES = (0.01, 0.1, 0.0)


def main_stack() -> tuple[str, ...]:
    """Returns the stack of the main thread as `file:line function`, innermost first.

    Of the frames outside this package it contains only the innermost one, and it has at most
    `MAX_FRAMES` frames.
    """
    stack: list[str] = []
    for frame in _frames_of_thread(threading.main_thread().ident):
        if len(stack) == MAX_FRAMES:
            break
        file = frame.f_code.co_filename
        _, package_directory, path_in_package = file.rpartition(f"/{_PACKAGE}/")
        if package_directory and path_in_package == _SCRIPT_RUNNER:
            # This frame and those around it only run the script of the user.
            break
        if package_directory:
            file = f"{_PACKAGE}/{path_in_package}"
        if package_directory or not stack:
            stack.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
    return tuple(stack)


def path_in_stack(module: types.ModuleType) -> str:
    """Returns the text by which `main_stack` shows a module of this package.

    For a package it is the directory, so that it matches all modules in it.
    """
    path = module.__name__.replace(".", "/")
    return f"{path}/" if hasattr(module, "__path__") else f"{path}.py"


class FrameWatch:
    """Lets other threads ask whether a function call of this thread is still running."""

    def __init__(self, function_name: str):
        """Finds the innermost call of a function in this thread.

        If there is no such call, `is_running` always returns True.
        """
        self._thread = threading.get_ident()
        self._is_running = True
        caller = inspect.currentframe()
        self._frame: types.FrameType | None = caller.f_back if caller is not None else None
        while self._frame is not None and self._frame.f_code.co_name != function_name:
            self._frame = self._frame.f_back

    def is_running(self) -> bool:
        """Returns whether the call has neither returned nor raised an exception."""
        if self._frame is None:
            return self._is_running
        # Look several times, because the thread continues while its frames are listed. If it is in
        # a generator that is suspended in between, the generator's frame no longer leads to the
        # frames around it.
        for pause in _RETRY_PAUSES:
            if any(frame is self._frame for frame in _frames_of_thread(self._thread)):
                return True
            time.sleep(pause)
        self._is_running = False
        # The frame would keep the call's variables alive.
        self._frame = None
        return False


def _frames_of_thread(thread: int | None) -> Iterator[types.FrameType]:
    """Yields the frames of a thread, innermost first."""
    frame = _innermost_frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _innermost_frames() -> dict[int, types.FrameType]:
    """Returns the innermost frame of each thread.

    Garbage collection is off meanwhile. Python before 3.12.1 holds a lock of the interpreter while
    it lists the frames. If garbage is collected then, and another thread is just starting, the
    whole process deadlocks (CPython issue 106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
