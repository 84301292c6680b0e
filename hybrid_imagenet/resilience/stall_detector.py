"""Names ranks that hang, from the ranks' reports. No threads, no TensorFlow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybrid_imagenet.resilience.heartbeats import Beat

_STEPS_PATIENCE = 4  # a step may take so many times the mean before ranks are said to hang


@dataclasses.dataclass(frozen=True)
class Stall:
    """The verdict that ranks hang: `text` is the report, `ranks` the culprits if known, `seconds` for how long."""

    text: str
    ranks: tuple[int, ...]
    seconds: float


class Ledger:
    """Keeps every rank's last beat and judges from them who hangs. Times are on this process's monotonic clock."""

    def __init__(self, patience: float, waits_in: Sequence[str] = ()):
        """Takes the limit: a rank hangs when it was silent, or all ranks were without progress, for `patience` seconds.

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
        """Returns the seconds since a rank was heard; 0 for one that was never heard or has left."""
        return now - self._beats[rank][1] if rank in self._beats else 0.0

    def stall(self, now: float) -> Stall | None:
        """Returns the ranks that hang, or None.

        Silent ranks are named first: they are stopped, or their host or network is gone. If all are heard but none
        advances, it is those behind in steps, else those that do not wait for others, else all.
        """
        silent = [rank for rank in self._beats if self.silence(rank, now) > self._patience]
        if silent:
            return self._report(silent, max(self.silence(rank, now) for rank in silent), "silent", now)
        idle, beats = self._idle(now), self._last()
        if idle is None or idle <= max(self._patience, _STEPS_PATIENCE * max(beat.mean for beat in beats)):
            return None
        return self._report(self._suspects(beats), idle, "without progress", now)

    def _last(self) -> list[Beat]:
        return [beat for beat, _ in self._beats.values()]

    def _idle(self, now: float) -> float | None:
        """Returns the seconds without progress of any rank, if they are too many; None also where beats are missing."""
        beats = self._last()
        if not beats or any(beat.step is None for beat in beats):
            return None
        idle = min(beat.idle + now - heard for beat, heard in self._beats.values())
        if any(self.silence(rank, now) > self._patience / 2 for rank in self._beats):
            return None  # either they come, or their rank is named as silent in a moment
        return idle if idle > self._patience else None

    def _suspects(self, beats: Sequence[Beat]) -> list[int]:
        """Returns the culprits among ranks without progress."""
        everyone = [beat.rank for beat in beats]
        steps = [beat.step for beat in beats if beat.step is not None]
        behind = [beat.rank for beat in beats if beat.step == min(steps)]
        if len(behind) < len(beats):
            return behind
        busy = [b.rank for b in beats if not any(part in frame for frame in b.stack for part in self._waits_in)]
        return busy or everyone

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
