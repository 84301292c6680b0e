"""Encodes heartbeats, and decides from the latest ones which ranks hang.

This module uses neither threads nor TensorFlow. Anyone who can reach a rank's port may send it
anything, so the token of the run is compared first: a datagram that does not begin with it is
neither parsed nor stored.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import re
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.errors import printable
from hybrid_imagenet.resilience.stacks import MAX_FRAMES

# Longer datagrams are dropped unread.
MAX_DATAGRAM_BYTES = 8192
_MAX_TEXT_LENGTH = 255
# Ranks hang only if no step has ended for this many times the mean step, because single steps may
# take longer than the others.
_SLOW_STEP_FACTOR = 4
_WAITING_APART_HINT = (
    "stall: they wait for each other in different places: ranks need equal numbers of batches and"
    " of collectives"
)


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """The state of one rank, as the rank itself reports it.

    Attributes:
      rank: Its number.
      host: The name of its host.
      process: Its process number on that host.
      step: The last finished step, or None before the first step of this session.
      idle_seconds: Time since its last progress; 0 before the first step.
      mean_step_seconds: Mean time between two calls that recorded progress.
      stack: The Python frames of its main thread, innermost first, as `file:line function`.
      begun_steps: Number of steps that have begun, or 0 if they are not counted.
      has_stopped: Whether it takes no step after its last one.
      leaving: True in the last heartbeat of a rank that stops its watchdog in good order.
    """

    rank: int
    host: str
    process: int
    step: int | None
    idle_seconds: float
    mean_step_seconds: float
    stack: tuple[str, ...]
    begun_steps: int = 0
    has_stopped: bool = False
    leaving: bool = False

    def encode(self, token: str) -> bytes:
        """Returns the datagram, without the outermost frames if it would be too long."""
        values = dataclasses.asdict(self)
        values["stack"] = [frame[-_MAX_TEXT_LENGTH:] for frame in self.stack[:MAX_FRAMES]]
        while True:
            data = (token + json.dumps(values)).encode()
            if len(data) <= MAX_DATAGRAM_BYTES or not values["stack"]:
                return data
            values["stack"].pop()

    @staticmethod
    def decode(data: bytes, token: str, size: float = float("inf")) -> Heartbeat | None:
        """Returns the heartbeat in a datagram, or None if the datagram is not valid.

        Texts are returned as they were sent. `HeartbeatLog` escapes only those that it reports,
        because thousands of heartbeats may arrive within an interval.

        Args:
          data: The datagram.
          token: The token of the run, with which the datagram must begin.
          size: Number of ranks of the job; heartbeats of higher ranks are not valid.
        """
        key = token.encode()
        if len(data) > MAX_DATAGRAM_BYTES or not hmac.compare_digest(data[: len(key)], key):
            return None
        try:
            values = json.loads(data[len(key) :])
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or not _is_valid(values) or values["rank"] >= size:
            return None
        return Heartbeat(**{**values, "stack": tuple(values["stack"])})


_NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "host": (str,),
    "process": (int,),
    "step": (int, type(None)),
    "idle_seconds": _NUMBER,
    "mean_step_seconds": _NUMBER,
    "stack": (list,),
    "begun_steps": (int,),
    "has_stopped": (bool,),
    "leaving": (bool,),
}


def _is_valid(values: dict[str, Any]) -> bool:
    """Returns whether all attributes of a heartbeat are there, with valid types and ranges."""
    if values.keys() != _TYPES.keys():
        return False
    for name, value in values.items():
        if type(value) not in _TYPES[name]:
            return False
        if type(value) in _NUMBER and not 0 <= value < 1 << 63:
            return False
    stack = values["stack"]
    return len(stack) <= MAX_FRAMES and all(isinstance(frame, str) for frame in stack)


@dataclasses.dataclass(frozen=True)
class Stall:
    """Ranks that hang.

    Attributes:
      report: Lines for the user.
      ranks: The culprits; all ranks if no rank differs from the others.
      seconds: Time in seconds for which they have been silent or without progress.
    """

    report: str
    ranks: tuple[int, ...]
    seconds: float


class HeartbeatLog:
    """Keeps the last heartbeat of each rank and finds ranks that hang.

    Times are in seconds on this process's monotonic clock.
    """

    def __init__(self, patience: float, waiting_paths: Sequence[str] = ()):
        """Sets the time limit.

        Args:
          patience: Seconds after which a silent rank hangs; also seconds without progress of any
            rank after which ranks hang.
          waiting_paths: Modules, as stacks show them (`stacks.path_in_stack`), in which a rank that
            has done its own work waits for the others.
        """
        self._patience = patience
        self._waiting_paths = tuple(waiting_paths)
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}

    def record(self, heartbeat: Heartbeat, now: float) -> None:
        """Stores a heartbeat, or forgets the rank if it is leaving."""
        if heartbeat.leaving:
            self._heartbeats.pop(heartbeat.rank, None)
        else:
            self._heartbeats[heartbeat.rank] = (heartbeat, now)

    def forgive(self, seconds: float) -> None:
        """Excludes a period in which this process itself could not listen."""
        self._heartbeats = {
            rank: (heartbeat, received + seconds)
            for rank, (heartbeat, received) in self._heartbeats.items()
        }

    def seconds_silent(self, rank: int, now: float) -> float:
        """Returns the time since a rank's last heartbeat.

        Returns 0 for a rank that has left, or that has never sent one.
        """
        if rank not in self._heartbeats:
            return 0.0
        _, received = self._heartbeats[rank]
        return now - received

    def longest_step_seconds(self) -> float:
        """Returns how long a step may take, because single steps take longer than the mean."""
        means = (heartbeat.mean_step_seconds for heartbeat in self._latest())
        return _SLOW_STEP_FACTOR * max(means, default=0.0)

    def last_step(self, rank: int) -> int | None:
        """Returns the last finished step of a rank that has sent a heartbeat."""
        return self._heartbeats[rank][0].step

    def find_separate_stop(self) -> tuple[list[int], list[int]]:
        """Returns the ranks that have stopped, and those that wait for them in a later step.

        All ranks take part in each step, so a step can never end that only some of them begin.
        """
        stopped = [beat for beat in self._latest() if beat.has_stopped and beat.step is not None]
        if not stopped:
            return [], []
        first = min(beat.step for beat in stopped if beat.step is not None)
        running = [
            beat.rank
            for beat in self._latest()
            if not beat.has_stopped and beat.begun_steps > first
        ]
        return sorted(beat.rank for beat in stopped), sorted(running)

    def find_stall(self, now: float) -> Stall | None:
        """Returns the ranks that hang, or None.

        Silent ranks come first: they are stopped, or their host or network is lost. As soon as one
        rank exceeds the limit, all ranks that have been silent for half of it are included, so that
        the ranks of a lost host are reported together.

        If all ranks send heartbeats but none advances, the culprits are those with the fewest
        steps; if all have done the same steps, those that do not wait for others; else all.
        """
        silences = {rank: self.seconds_silent(rank, now) for rank in self._heartbeats}
        longest = max(silences.values(), default=0.0)
        if longest > self._patience:
            silent = [rank for rank, seconds in silences.items() if seconds > self._patience / 2]
            return self._stall(silent, longest, "has been silent")
        idle = self._seconds_without_progress(now)
        if idle is None:
            return None
        heartbeats = self._latest()
        if idle <= max(self._patience, self.longest_step_seconds()):
            return None
        ranks, hint = self._suspects(heartbeats)
        return self._stall(ranks, idle, "has made no progress", hint)

    def _latest(self) -> list[Heartbeat]:
        return [heartbeat for heartbeat, _ in self._heartbeats.values()]

    def _seconds_without_progress(self, now: float) -> float | None:
        """Returns the time in which no rank has advanced, or None.

        None means that the time is within the limit, or that heartbeats are missing to decide.
        """
        heartbeats = self._latest()
        if not heartbeats or any(heartbeat.step is None for heartbeat in heartbeats):
            return None
        # A heartbeat that is overdue either comes soon, or its rank will be reported as silent.
        if any(self.seconds_silent(rank, now) > self._patience / 2 for rank in self._heartbeats):
            return None
        idle = min(
            heartbeat.idle_seconds + now - received
            for heartbeat, received in self._heartbeats.values()
        )
        return idle if idle > self._patience else None

    def _suspects(self, heartbeats: Sequence[Heartbeat]) -> tuple[list[int], str]:
        """Returns the ranks that the others wait for, and a hint for the user, "" without one."""
        fewest_steps = min(beat.step for beat in heartbeats if beat.step is not None)
        behind = [beat.rank for beat in heartbeats if beat.step == fewest_steps]
        if len(behind) < len(heartbeats):
            return behind, ""
        busy = [beat.rank for beat in heartbeats if not self._waits_for_others(beat)]
        if busy:
            return busy, ""
        outermost = (beat.stack[-1] for beat in heartbeats if beat.stack)
        places = {re.sub(r":\d+ ", " ", frame) for frame in outermost}
        hint = _WAITING_APART_HINT if len(places) > 1 else ""
        return [beat.rank for beat in heartbeats], hint

    def _waits_for_others(self, heartbeat: Heartbeat) -> bool:
        return any(path in frame for frame in heartbeat.stack for path in self._waiting_paths)

    def _stall(self, ranks: Sequence[int], seconds: float, state: str, hint: str = "") -> Stall:
        lines = []
        for rank in sorted(ranks):
            heartbeat, _ = self._heartbeats[rank]
            # Steps after the last heartbeat of a silent rank are unknown.
            moment = "no step reported"
            if heartbeat.step is not None:
                moment = f"last step: {heartbeat.step}"
            host = _printable_end(heartbeat.host)
            lines.append(
                f"stall: rank {rank} on {host} (process {heartbeat.process}) {state} for"
                f" {seconds:.0f} s ({moment}). Python stack:"
            )
            lines += [f"stall:   {_printable_end(frame)}" for frame in heartbeat.stack]
        if hint:
            lines.append(hint)
        return Stall("\n".join(lines), tuple(sorted(ranks)), seconds)


def _printable_end(text: str) -> str:
    return printable(text[-_MAX_TEXT_LENGTH:])
