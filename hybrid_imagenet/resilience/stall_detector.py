"""Names ranks that hang and hosts that are slow, from the ranks' reports. No threads, no TensorFlow."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from hybrid_imagenet.resilience.heartbeats import Beat

_STEPS_PATIENCE = 4  # a step may take so many times the mean before ranks are said to hang
_QUEUE_BYTES = 1 << 16  # a queue on the way to another host that is worth a word
_TIMES_OTHERS = 2  # a host computes slowly when it takes so many times what the others take
_SHARE = 0.25  # and at least this share of the time for which a step has gone on


@dataclasses.dataclass(frozen=True)
class Stall:
    """The verdict that ranks hang: `text` is the report, `ranks` the culprits if known, `seconds` for how long."""

    text: str
    ranks: tuple[int, ...]
    seconds: float


class Ledger:
    """Keeps every rank's last beat and judges from them who hangs. Times are on this process's monotonic clock."""

    def __init__(self, patience: float, waits_in: Sequence[str] = (), hosts: Mapping[str, str] | None = None):
        """Takes the limit: a rank hangs when it was silent, or all ranks were without progress, for `patience` seconds.

        Args:
          patience: seconds.
          waits_in: the files (see `shown_file`) in which a rank that has done its own part waits for the others.
          hosts: the host at each address.
        """
        self._patience = patience
        self._waits_in = tuple(waits_in)
        self._hosts = dict(hosts or {})
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
        advances, it is those behind in steps, else those that do not wait for others, else ranks of a slow host, else
        all.
        """
        silent = [rank for rank in self._beats if self.silence(rank, now) > self._patience]
        if silent:
            return self._report(silent, max(self.silence(rank, now) for rank in silent), "silent", now)
        idle, beats = self._idle(now), self._last()
        if idle is None or idle <= max(self._patience, _STEPS_PATIENCE * max(beat.mean for beat in beats)):
            return None
        ranks, why = self._suspects(beats, idle)
        stall = self._report(ranks, idle, "without progress", now)
        return dataclasses.replace(stall, text=f"{stall.text}\n{why}") if why else stall

    def slow(self, now: float) -> str | None:
        """Returns a line that names the host for which a step has waited longer than `patience`; None if there is none.

        Bytes that wait to be sent to or from one host, and far fewer elsewhere, show that its network is slow. Else
        it is the host whose ranks compute for much longer per step than the others.
        """
        idle, beats = self._idle(now), self._last()
        if idle is None:
            return None
        found = self._slow_network(beats) or _slow_computation(beats, idle)
        if found is None:
            return None
        host, what = found
        step = max(beat.step for beat in beats if beat.step is not None) + 1
        return f"slow: step {step} has taken {idle:.0f} s: {what}{_times(beats, host)}"

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

    def _suspects(self, beats: Sequence[Beat], idle: float) -> tuple[list[int], str]:
        """Returns the culprits among ranks without progress, and a line on why if they are on a slow host."""
        everyone = [beat.rank for beat in beats]
        steps = [beat.step for beat in beats if beat.step is not None]
        behind = [beat.rank for beat in beats if beat.step == min(steps)]
        if len(behind) < len(beats):
            return behind, ""
        busy = [b.rank for b in beats if not any(part in frame for frame in b.stack for part in self._waits_in)]
        if busy and len(busy) < len(beats):
            return busy, ""
        found = self._slow_network(beats) or _slow_computation(beats, idle)
        if found is None:
            return everyone, ""
        host, what = found
        return [b.rank for b in beats if b.host == host] or everyone, f"stall: {what}{_times(beats, host)}"

    def _slow_network(self, beats: Sequence[Beat]) -> tuple[str, str] | None:
        """Returns the host to and from which most bytes wait, and what to say about it."""
        ways: collections.Counter[tuple[str, str]] = collections.Counter()
        for beat in beats:
            for address, count in beat.unsent:
                receiver = self._hosts.get(address)
                if receiver is not None and receiver != beat.host:
                    ways[beat.host, receiver] += count
        hosts: collections.Counter[str] = collections.Counter()
        for way, count in ways.items():
            hosts.update(dict.fromkeys(way, count))
        (first, most), (_, next_most) = [*hosts.most_common(2), ("", 0), ("", 0)][:2]
        if most < _QUEUE_BYTES:
            return None
        if most >= 1.5 * next_most:
            return first, f"the network of {first} is slow ({most / 1e6:.2g} MB wait to be sent to it or by it)"
        (sender, receiver), count = ways.most_common(1)[0]
        return sender, f"the way from {sender} to {receiver} is slow ({count / 1e6:.2g} MB wait to be sent)"

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


def _by_host(beats: Sequence[Beat]) -> dict[str, float]:
    """Returns the seconds of computation per step of the slowest rank of each host; empty if some are not known."""
    if any(beat.computation is None for beat in beats):
        return {}
    return {b.host: max(o.computation or 0.0 for o in beats if o.host == b.host) for b in beats}


def _slow_computation(beats: Sequence[Beat], idle: float) -> tuple[str, str] | None:
    """Returns the host that computes for much longer than the others, and what to say about it."""
    seconds = _by_host(beats)
    if len(seconds) < 2:
        return None
    slowest = max(seconds, key=lambda host: seconds[host])
    others = statistics.median(value for host, value in seconds.items() if host != slowest)
    if seconds[slowest] < max(_TIMES_OTHERS * others, _SHARE * idle):
        return None
    return slowest, f"{slowest} computes slowly"


def _times(beats: Sequence[Beat], host: str) -> str:
    """Returns `: 2 s of computation and 1 s of communication per step, elsewhere 1 s and 2 s`; "" if not measured."""
    own = [beat for beat in beats if beat.host == host and beat.computation is not None]
    others = [beat for beat in beats if beat.host != host and beat.computation is not None]
    if not own or not others:
        return ""
    means = [
        statistics.fmean(values)
        for part in (own, others)
        for values in ([b.computation or 0.0 for b in part], [b.communication or 0.0 for b in part])
    ]
    return (
        f": {means[0]:.3g} s of computation and {means[1]:.3g} s of communication per step, "
        f"elsewhere {means[2]:.3g} s and {means[3]:.3g} s"
    )
