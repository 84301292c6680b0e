"""Encodes and decodes the reports that ranks send each other about themselves. No threads, no TensorFlow."""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from hybrid_imagenet.resilience.datagrams import MAX_BYTES, duration, printable, seal, unseal, whole

_PACKAGE = "hybrid_imagenet"
_FRAMES = 12  # of the main thread, the innermost ones
_LONGEST = 255  # characters of a name or a frame


@dataclasses.dataclass(frozen=True)
class Beat:
    """One rank's report of itself.

    Attributes:
      rank: its number.
      host: its host's name.
      process: its process number there.
      step: the last finished step; None before the first step of this session.
      idle: seconds since its last progress; 0 before the first step.
      mean: mean seconds between two notes of progress.
      stack: the Python frames of its main thread, innermost first, as `file:line function`.
      leaving: whether it leaves the watch in good order.
    """

    rank: int
    host: str
    process: int
    step: int | None
    idle: float
    mean: float
    stack: tuple[str, ...]
    leaving: bool = False

    def encode(self, token: str) -> bytes:
        """Returns the datagram; outer frames of the stack are left out if it would be too long."""
        values = dataclasses.asdict(self)
        values["stack"] = [frame[-_LONGEST:] for frame in self.stack[:_FRAMES]]
        while len(data := seal(values, token)) > MAX_BYTES and values["stack"]:
            values["stack"].pop()
        return data

    @staticmethod
    def decode(data: bytes, token: str, ranks: float = float("inf")) -> Beat | None:
        """Inverts `encode`; None for what does not carry the run's token or is not a beat of one of `ranks` ranks.

        Texts are cut and escaped rather than refused: a rank with a strange name lives all the same.
        """
        values = unseal(data, token)
        if not isinstance(values, dict) or values.keys() != _FIELDS or not _valid(values, ranks):
            return None
        return Beat(
            **{
                **values,
                "host": printable(values["host"], _LONGEST),
                "stack": tuple(printable(frame, _LONGEST) for frame in values["stack"]),
            }
        )


_FIELDS = {field.name for field in dataclasses.fields(Beat)}


def _valid(values: dict[str, Any], ranks: float) -> bool:
    """Returns whether the values of a beat have the types and ranges that its attributes promise."""
    return (
        whole(values["rank"], ranks)
        and isinstance(values["host"], str)
        and whole(values["process"])
        and (values["step"] is None or whole(values["step"]))
        and duration(values["idle"])
        and duration(values["mean"])
        and isinstance(values["stack"], list)
        and len(values["stack"]) <= _FRAMES
        and all(isinstance(frame, str) for frame in values["stack"])
        and isinstance(values["leaving"], bool)
    )


def shown_file(module: types.ModuleType) -> str:
    """Returns the part of a stack's lines that names a module of this package; of a package, all of its modules."""
    path = module.__name__.replace(".", "/")
    return f"{path}/" if hasattr(module, "__path__") else f"{path}.py"


def _frames() -> dict[int, types.FrameType]:
    """The frames of all threads.

    Python before 3.12.1 holds a lock of the interpreter while it lists them: a garbage collection in between, with
    another thread just starting, ends in a deadlock of the whole process (CPython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _calls(thread: int | None) -> Iterator[types.FrameType]:
    """The frames of a thread, innermost first."""
    frame = _frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def main_stack() -> tuple[str, ...]:
    """Returns the innermost frame of the main thread and the frames of this package around it, innermost first."""
    found: list[str] = []
    for frame in _calls(threading.main_thread().ident):
        if len(found) == _FRAMES:
            break
        file = frame.f_code.co_filename
        ours = f"/{_PACKAGE}/" in file
        if ours or not found:
            shown = _PACKAGE + "/" + file.rpartition(f"/{_PACKAGE}/")[2] if ours else file
            found.append(f"{shown}:{frame.f_lineno} {frame.f_code.co_name}")
    return tuple(found)


class Call:
    """The innermost call of a function in this thread, after which other threads can ask."""

    def __init__(self, function: str):
        """Finds the call by the name of the function; where there is none, `lasts` stays true."""
        self._thread = threading.get_ident()
        self._lasts = True
        self._frame: types.FrameType | None = sys._getframe(1)
        while self._frame is not None and self._frame.f_code.co_name != function:
            self._frame = self._frame.f_back

    def lasts(self) -> bool:
        """Returns whether it has neither returned nor ended with an exception."""
        if self._frame is None:
            return self._lasts
        # Looked at again, since the thread runs on meanwhile: a generator that rests by then no longer leads to the
        # frames around it.
        for pause in (0.01, 0.1, 0.0):
            if any(frame is self._frame for frame in _calls(self._thread)):
                return True
            time.sleep(pause)
        self._lasts, self._frame = False, None  # the frame would keep the call's variables
        return False
