"""Names the ranks that do not keep up with the others while a job starts: the watchdog needs
connected ranks.

Each rank writes the stage of its start on standard error, after the job's word, when it changes and
every few seconds. The supervisor takes these lines out, as it does with exit codes (`exit_code`).
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple

from hybrid_imagenet.errors import printable
from hybrid_imagenet.resilience import exit_code
from hybrid_imagenet.resilience.heartbeats import main_stack

EVERY = 10.0  # seconds between two lines of a rank
_OVER = "over"
_PATIENCE = 30.0  # seconds that ranks may be behind the first one, or silent
_NAMED = 3  # of the ranks that are behind
_FORM = re.compile(
    rb" at (\d{1,6}) of (\d{1,6}) on (\S{1,255}) (\d{1,9})\t([^\t\n]{0,99})\t([^\t\n]*)"
)


class _Rank(NamedTuple):
    host: str
    process: int
    stage: str
    frame: str
    heard: float


def announce(rank: int, size: int, stage: str | None) -> None:
    """Writes this rank's line if it has a supervisor that reads; None says that its start is
    over.
    """
    if select.select([], [2], [], 0)[
        1
    ]:  # a line is shorter than what a pipe that is ready takes at once
        frame = next((frame for frame in main_stack() if not frame.startswith("<")), "")[-255:]
        shown = _OVER if stage is None else stage or "starting"
        exit_code.tell(
            f"at {rank} of {size} on {socket.gethostname()}"
            f" {os.getpid()}\t{shown}\t{printable(frame)}"
        )


class Arrivals:
    """What the ranks of a job have said of their starts. Times are on the supervisor's monotonic
    clock.
    """

    def __init__(self, places: Sequence[str] = ()):
        """Takes the host of each rank, as far as the launcher's command line tells it."""
        self._places = places
        self._ranks: dict[int, _Rank] = {}
        self._size = 0
        self._reached: dict[str, float] = {}  # when the first rank came to a stage
        self._told: set[int] = set()

    @property
    def any(self) -> bool:
        """Whether a rank has started."""
        return bool(self._ranks)

    def heard(self, text: bytes, now: float) -> bool:
        """Notes what follows the job's word in a line; returns whether it is of this form."""
        found = _FORM.match(text)
        if found is None:
            return False
        host, stage, frame = (found[n].decode(errors="replace") for n in (3, 5, 6))
        self._size = max(int(found[2]), int(found[1]) + 1)
        self._ranks[int(found[1])] = _Rank(host, int(found[4]), stage, frame, now)
        self._reached.setdefault(stage, now)
        return True

    def late(self, now: float) -> str:
        """Returns lines on the ranks that are behind the first one, or silent, for too long; "" if
        none is new.
        """
        if not self._reached or _OVER in self._reached:
            return ""
        stage, since = list(self._reached.items())[-1]
        behind = [
            rank
            for rank in range(self._size if now - since > _PATIENCE else 0)
            if (at := self._ranks.get(rank)) is None
            or at.stage != stage
            or now - at.heard > _PATIENCE
        ]
        if len(behind) == self._size:
            return ""
        new, self._told = set(behind) - self._told, set(behind)
        if not new:  # of thousands of ranks that come one by one each look finds fewer
            return ""
        lines = [f"stall: {self._described(rank, now)}" for rank in behind[:_NAMED]]
        lines += [f"stall: {len(behind) - _NAMED} more ranks"] * (len(behind) > _NAMED)
        return "".join(
            f"{line}; others have been {stage} for {now - since:.0f} s\n" for line in lines
        )

    def _described(self, rank: int, now: float) -> str:
        at = self._ranks.get(rank)
        if at is None:
            host = f" on {printable(self._places[rank])}" if rank < len(self._places) else ""
            return f"rank {rank}{host} has not started"
        where = f"rank {rank} on {printable(at.host)} (process {at.process})"
        return f"{where} was heard {now - at.heard:.0f} s ago, {at.stage}, in {printable(at.frame)}"
