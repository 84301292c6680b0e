"""Measures computation and communication per step, and the bytes queued for other hosts, to explain slow steps."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

_TABLE = Path("/proc/self/net/tcp")  # of this network namespace; the kernel's proc(5) describes its columns
_ESTABLISHED = "01"


class StepTimes:
    """Measures seconds of computation and of communication per step, anew every so often.

    A daemon thread of its own asks for the totals, as their owner may make it wait: who reads `latest` never waits.
    """

    def __init__(self, totals: Callable[[], tuple[float, int]], interval: float):
        """Starts the thread.

        Args:
          totals: seconds of communication that steps have waited for, and the number of these steps, up to now.
          interval: seconds between measurements.
        """
        self.latest: tuple[float, float] | None = None
        self._totals, self._interval = totals, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="step times", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the measurement under way, for which it does not wait."""
        self._stop.set()

    def _measure(self) -> None:
        waited, steps = self._totals()
        began = time.monotonic()
        while not self._stop.wait(self._interval):
            now_waited, now_steps = self._totals()
            now = time.monotonic()
            if now_steps > steps:
                count = now_steps - steps
                communication = max(0.0, now_waited - waited) / count
                self.latest = (max(0.0, (now - began) / count - communication), communication)
            if now_steps != steps:
                waited, steps, began = now_waited, now_steps, now


class Queues:
    """Measures the bytes that wait to be sent on this process's TCP connections, by destination address."""

    def __init__(self) -> None:
        """Takes the first look; nothing is known before the second."""
        self._before: dict[str, int] = {}

    def look(self) -> tuple[tuple[str, int], ...]:
        """Returns (address, bytes) that have waited since the last look at least: a queue that empties is none."""
        found = _queues()
        lasting = {address: min(count, self._before.get(address, 0)) for address, count in found.items()}
        self._before = found
        return tuple((address, count) for address, count in lasting.items() if count)


def _queues() -> dict[str, int]:
    own = _own_sockets()
    found: dict[str, int] = {}
    try:
        lines = _TABLE.read_text().splitlines()[1:]
    except OSError:  # not Linux
        return found
    for words in map(str.split, lines):
        # sl, local address, remote address, state, tx_queue:rx_queue, timer, retransmissions, uid, timeout, inode
        if words[3] == _ESTABLISHED and words[9] in own:
            address = socket.inet_ntoa(struct.pack("=I", int(words[2].partition(":")[0], 16)))
            found[address] = found.get(address, 0) + int(words[4].partition(":")[0], 16)
    return found


def _own_sockets() -> set[str]:
    """Returns the inode numbers of this process's sockets."""
    found = set()
    try:
        for path in Path("/proc/self/fd").iterdir():
            try:
                target = path.readlink().name
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        pass
    return found
