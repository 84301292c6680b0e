"""What ranks report about themselves to each other, and who hangs, judged from that. No threads, no
TensorFlow.

Anybody who reaches a rank's port may send it anything. What does not begin with the run's token
costs a comparison.
"""

from __future__ import annotations

import dataclasses
import gc
import hmac
import inspect
import json
import re
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_imagenet.errors import printable

MAX_BYTES = 8192  # of a datagram; longer ones are dropped unread
_PACKAGE = "hybrid_imagenet"
_FRAMES = 12  # of the main thread, the innermost ones
_LONGEST = 255  # characters of a name or a frame
_STEPS_PATIENCE = 4  # a step may take this many times the mean before ranks are said to hang
_APART = (
    "stall: they wait for each other in different places: ranks need equal numbers of batches and"
    " of collectives"
)


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
        while len(data := (token + json.dumps(values)).encode()) > MAX_BYTES and values["stack"]:
            values["stack"].pop()
        return data

    @staticmethod
    def decode(data: bytes, token: str, ranks: float = float("inf")) -> Beat | None:
        """Inverts `encode`; None for what does not carry the run's token or is not a beat of one of
        `ranks` ranks.

        Texts are as they came: thousands of beats in an interval cost little, and `Ledger` escapes
        what it reports.
        """
        key = token.encode()
        if len(data) > MAX_BYTES or not hmac.compare_digest(data[: len(key)], key):
            return None
        try:
            values = json.loads(data[len(key) :])
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or not _valid(values) or values["rank"] >= ranks:
            return None
        return Beat(**{**values, "stack": tuple(values["stack"])})


_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "host": (str,),
    "process": (int,),
    "step": (int, type(None)),
    "idle": _NUMBER,
    "mean": _NUMBER,
    "stack": (list,),
    "leaving": (bool,),
}


def _valid(values: dict[str, Any]) -> bool:
    """Returns whether the values of a beat have the types and ranges that its attributes
    promise.
    """
    return (
        values.keys() == _TYPES.keys()
        and all(type(value) in _TYPES[name] for name, value in values.items())
        and all(0 <= value < 1 << 63 for value in values.values() if type(value) in _NUMBER)
        and len(values["stack"]) <= _FRAMES
        and all(isinstance(frame, str) for frame in values["stack"])
    )


def _shown(text: str) -> str:
    return printable(text[-_LONGEST:])


def shown_file(module: types.ModuleType) -> str:
    """Returns the part of a stack's lines that names a module of this package; of a package, all of
    its modules.
    """
    path = module.__name__.replace(".", "/")
    return f"{path}/" if hasattr(module, "__path__") else f"{path}.py"


def _frames() -> dict[int, types.FrameType]:
    """The frames of all threads.

    Python before 3.12.1 holds a lock of the interpreter while it lists them: a garbage collection
    in between, with another thread just starting, ends in a deadlock of the whole process (CPython
    issue 106883).
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
    """Returns the innermost frame of the main thread and the frames of this package around it,
    innermost first.
    """
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
        here = inspect.currentframe()
        self._frame: types.FrameType | None = here.f_back if here is not None else None
        while self._frame is not None and self._frame.f_code.co_name != function:
            self._frame = self._frame.f_back

    def lasts(self) -> bool:
        """Returns whether it has neither returned nor ended with an exception."""
        if self._frame is None:
            return self._lasts
        # Looked at again, since the thread runs on meanwhile: a generator that rests by then no
        # longer leads to the frames around it.
        for pause in (0.01, 0.1, 0.0):
            if any(frame is self._frame for frame in _calls(self._thread)):
                return True
            time.sleep(pause)
        self._lasts, self._frame = False, None  # the frame would keep the call's variables
        return False


@dataclasses.dataclass(frozen=True)
class Stall:
    """The verdict that ranks hang: `text` is the report, `ranks` the culprits if known, `seconds`
    for how long.
    """

    text: str
    ranks: tuple[int, ...]
    seconds: float


class Ledger:
    """Keeps every rank's last beat and judges from them who hangs. Times are on this process's
    monotonic clock.
    """

    def __init__(self, patience: float, waits_in: Sequence[str] = ()):
        """Takes the limit: a rank hangs when it was silent, or all ranks were without progress, for
        `patience` seconds.

        Args:
          patience: seconds.
          waits_in: the files (see `shown_file`) in which a rank that has done its own part waits
            for the others.
        """
        self._patience = patience
        self._waits_in = tuple(waits_in)
        self._beats: dict[int, tuple[Beat, float]] = {}

    def heard(self, beat: Beat, now: float) -> None:
        """Notes a beat."""
        if beat.leaving:
            self._beats.pop(beat.rank, None)
        else:
            self._beats[beat.rank] = (beat, now)

    def forgive(self, seconds: float) -> None:
        """Leaves a time out of account in which this process could not listen."""
        self._beats = {rank: (beat, heard + seconds) for rank, (beat, heard) in self._beats.items()}

    def silence(self, rank: int, now: float) -> float:
        """Returns the seconds since a rank was heard; 0 for one that was never heard or has
        left.
        """
        return now - self._beats[rank][1] if rank in self._beats else 0.0

    def stall(self, now: float) -> Stall | None:
        """Returns the ranks that hang, or None.

        Silent ranks are named first: they are stopped, or their host or network is gone. With the
        first whose time is up come those on their way there, so that a lost host is told once. If
        all are heard but none advances, it is those behind in steps, else those that do not wait
        for others, else all.
        """
        silences = {rank: self.silence(rank, now) for rank in self._beats}
        longest = max(silences.values(), default=0.0)
        if longest > self._patience:
            silent = [rank for rank, seconds in silences.items() if seconds > self._patience / 2]
            return self._report(silent, longest, "silent", now)
        idle, beats = self._idle(now), self._last()
        if idle is None or idle <= max(
            self._patience, _STEPS_PATIENCE * max(beat.mean for beat in beats)
        ):
            return None
        suspects, hint = self._suspects(beats)
        return self._report(suspects, idle, "without progress", now, hint)

    def _last(self) -> list[Beat]:
        return [beat for beat, _ in self._beats.values()]

    def _idle(self, now: float) -> float | None:
        """Returns the seconds without progress of any rank, if they are too many; None also where
        beats are missing.
        """
        beats = self._last()
        if not beats or any(beat.step is None for beat in beats):
            return None
        idle = min(beat.idle + now - heard for beat, heard in self._beats.values())
        if any(self.silence(rank, now) > self._patience / 2 for rank in self._beats):
            return None  # either they come, or their rank is named as silent in a moment
        return idle if idle > self._patience else None

    def _suspects(self, beats: Sequence[Beat]) -> tuple[list[int], str]:
        steps = [beat.step for beat in beats if beat.step is not None]
        behind = [beat.rank for beat in beats if beat.step == min(steps)]
        if len(behind) < len(beats):
            return behind, ""
        busy = [
            b.rank
            for b in beats
            if not any(part in frame for frame in b.stack for part in self._waits_in)
        ]
        places = {re.sub(r":\d+ ", " ", beat.stack[-1]) for beat in beats if beat.stack}
        return busy or [beat.rank for beat in beats], "" if busy or len(places) < 2 else _APART

    def _report(
        self, ranks: Sequence[int], seconds: float, state: str, now: float, hint: str = ""
    ) -> Stall:
        lines = []
        for rank in sorted(ranks):
            beat = self._beats[rank][0]
            where = "before its first step" if beat.step is None else f"after step {beat.step}"
            lines.append(
                f"stall: rank {rank} on {_shown(beat.host)} (process {beat.process}) is {state} for"
                f" {seconds:.0f} s, {where}; it was in"
            )
            lines += [f"stall:   {_shown(frame)}" for frame in beat.stack]
        lines += [hint] if hint else []
        return Stall("\n".join(lines), tuple(sorted(ranks)), seconds)
