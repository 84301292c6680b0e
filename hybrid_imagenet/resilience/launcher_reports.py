"""Takes a launcher's own report of how a job ended out of what the ranks print."""

from __future__ import annotations

import re
from typing import NamedTuple

_RULE = re.compile(rb"-{70,80}\r?\n?")
# How the blocks begin in which Open MPI tells that ranks have ended, which have said why themselves, or that hosts
# could not be reached, which ssh has said.
_BEGINNINGS = (
    b"Primary job  terminated normally, but",
    b"mpirun noticed that process rank",
    b"mpirun detected that one or more processes exited with non-zero status",
    b"mpirun has exited due to process rank",
    b"An MPI communication peer process has unexpectedly disconnected",
    b"ORTE was unable to reliably start one or more daemons",
    b"ORTE has lost communication with a remote daemon",
    b"ORTE does not know how to route a message to the specified daemon",
)
# Open MPI's words.
_KILLED = re.compile(rb"process rank (\d+)(?: with PID \d+)? on node (\S+) exited on signal (\d+)")
_LONGEST = 50  # lines of a block


class Killed(NamedTuple):
    """A rank that was ended by a signal, by its number and host."""

    rank: int
    host: str
    signal: int


class LauncherReports:
    """Reads standard error line by line.

    Attributes:
      killed: the first rank that a report says was ended by a signal.
    """

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self.killed: Killed | None = None
        self._rule = b""  # a line of dashes of which it is not known yet what follows
        self._left = 0  # lines that a report may still have

    def passed_on(self, line: bytes) -> bytes:
        """Returns what of a line, and of one that was kept back, is no report."""
        found = _KILLED.search(line)
        if found:
            self.killed = self.killed or Killed(int(found[1]), found[2].decode(errors="replace"), int(found[3]))
        if self._left:
            self._left = 0 if _RULE.fullmatch(line) else self._left - 1
            return b""
        kept, self._rule = self._rule, b""
        if kept and line.startswith(_BEGINNINGS):
            self._left = _LONGEST
            return b""
        if found:
            return kept
        if _RULE.fullmatch(line):
            self._rule = line
            return kept
        return kept + line

    def rest(self) -> bytes:
        """Returns what was kept back when nothing more comes."""
        kept, self._rule = self._rule, b""
        return kept
