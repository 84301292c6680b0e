"""What ranks tell each other about their progress, and the verdict on who hangs. No threads, no TensorFlow."""

from __future__ import annotations

import dataclasses
import hmac
import json
import socket
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

_PACKAGE = "hybrid_imagenet"
_FRAMES = 12  # of the main thread, the innermost ones; a beat must fit one datagram
_STEPS_PATIENCE = 4  # a step may take so many times the mean before anything is said


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
        """The datagram."""
        return json.dumps([token, dataclasses.asdict(self)]).encode()

    @staticmethod
    def decode(data: bytes, token: str) -> Beat | None:
        """The inverse of `encode`; None for what does not carry the run's token or is no beat."""
        try:
            given, values = json.loads(data)
            if not hmac.compare_digest(str(given).encode(), token.encode()):
                return None
            beat = Beat(**{**values, "stack": tuple(map(str, values["stack"]))})
            float(beat.idle), float(beat.mean), int(beat.rank)
        except (ValueError, TypeError, KeyError):
            return None
        return beat


def encode_verdict(ranks: Sequence[int], token: str) -> bytes:
    """The datagram by which a listener tells elastic ranks that they are to leave."""
    return json.dumps([token, {"leave": list(ranks)}]).encode()


def decode_verdict(data: bytes, token: str) -> tuple[int, ...]:
    """The ranks that are to leave; none for any other datagram."""
    try:
        given, values = json.loads(data)
        if hmac.compare_digest(str(given).encode(), token.encode()):
            return tuple(map(int, values["leave"]))
    except (ValueError, TypeError, KeyError):
        pass
    return ()


@dataclasses.dataclass(frozen=True)
class Stall:
    """Who hangs: `text` is the report, `ranks` the culprits as far as they can be told, `seconds` for how long."""

    text: str
    ranks: tuple[int, ...]
    seconds: float


class Ledger:
    """The last beat of every rank, and what follows from them. Times are those of this process's monotonic clock."""

    def __init__(self, patience: float, waits_in: Sequence[str] = ()):
        """A rank hangs when it was silent, or all ranks were without progress, for `patience` seconds.

        Args:
          patience: seconds.
          waits_in: the files (see `shown_file`) in which a rank that has done its own part waits for the others.
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
        """Seconds since a rank was heard; 0 for one that was never heard or has left."""
        return now - self._beats[rank][1] if rank in self._beats else 0.0

    def stall(self, now: float) -> Stall | None:
        """The ranks that hang, or None.

        Silent ranks are named first: they are stopped, or their host or network is gone. If all are heard but none
        advances, it is those behind in steps, else those that do not wait for others, else all.
        """
        silent = [rank for rank in self._beats if self.silence(rank, now) > self._patience]
        if silent:
            return self._report(silent, max(self.silence(rank, now) for rank in silent), "silent", now)
        beats = [beat for beat, _ in self._beats.values()]
        if not beats or any(beat.step is None for beat in beats):
            return None
        idle = min(beat.idle + now - heard for beat, heard in self._beats.values())
        if idle <= max(self._patience, _STEPS_PATIENCE * max(beat.mean for beat in beats)):
            return None
        if any(self.silence(rank, now) > self._patience / 2 for rank in self._beats):
            return None  # beats are missing: either they come, or their rank is named as silent in a moment
        return self._report(self._suspects(beats), idle, "without progress", now)

    def _suspects(self, beats: Sequence[Beat]) -> list[int]:
        steps = [beat.step for beat in beats if beat.step is not None]
        behind = [beat.rank for beat in beats if beat.step == min(steps)]
        if len(behind) < len(beats):
            return behind
        busy = [b.rank for b in beats if not any(part in frame for frame in b.stack for part in self._waits_in)]
        return busy or [beat.rank for beat in beats]

    def _report(self, ranks: Sequence[int], seconds: float, state: str, now: float) -> Stall:
        lines = []
        for rank in sorted(ranks):
            beat = self._beats[rank][0]
            where = "before its first step" if beat.step is None else f"after step {beat.step}"
            lines.append(
                f"stall: rank {rank} on {beat.host} (process {beat.process}) is {state} for {seconds:.0f} s, {where}; "
                f"it was in"
            )
            lines += [f"stall:   {frame}" for frame in beat.stack]
        return Stall("\n".join(lines), tuple(sorted(ranks)), seconds)


def shown_file(module: types.ModuleType) -> str:
    """The part of a stack's lines that names a module of this package; of a package, all of its modules."""
    path = module.__name__.replace(".", "/")
    return f"{path}/" if hasattr(module, "__path__") else f"{path}.py"


def main_stack() -> tuple[str, ...]:
    """The innermost frame of the main thread and the frames of this package around it, innermost first."""
    frame: types.FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        file = frame.f_code.co_filename
        ours = f"/{_PACKAGE}/" in file
        if ours or not found:
            shown = _PACKAGE + "/" + file.rpartition(f"/{_PACKAGE}/")[2] if ours else file
            found.append(f"{shown}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


def own_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, loopback left out."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer: Any = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]
