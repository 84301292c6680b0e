"""Finds and kills processes of this host through /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

_SETTLED = 5.0


def parent(process: int) -> int:
    """Returns the number of a process's parent; 0 if there is no such process."""
    return _status(process)[1]


def session(process: int) -> int:
    """Returns the session of a process; 0 if there is no such process."""
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return 0


def descendants(process: int) -> list[int]:
    """Returns all processes that stem from this one and have not ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            number = int(entry.name)
            state, above = _status(number)
            children.setdefault(above, []).append(number)
            if state in "ZX":
                ended.add(number)
    found: list[int] = []
    queue = list(children.get(process, ()))
    while queue:
        number = queue.pop()
        found.append(number)
        queue += children.get(number, ())
    return [number for number in found if number not in ended]


def children(process: int) -> list[int]:
    """Returns the direct children of a process, ascending."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(number for number in numbers if parent(number) == process)


def words(process: int) -> list[str]:
    """Returns the command line of a process; one empty word if there is no such process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def kill(processes: Iterable[int]) -> None:
    """Sends SIGKILL to each process that still runs."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def remove_shared_memory(since: float, within: Path = Path("/dev/shm")) -> None:
    """Removes what ranks on this host have left there of Open MPI when its launcher was killed, 4
    MiB each.

    Kept is what any process maps, what is newer than some seconds, as its rank may be about to map
    it, and what was made before `since`, in seconds since 1970: another job may have left it.
    """
    for path in within.glob(f"vader_segment.{socket.gethostname()}.{os.getuid()}.*"):
        with contextlib.suppress(OSError):
            if since <= path.stat().st_mtime < time.time() - _SETTLED and not _mapped(str(path)):
                path.unlink()


def _mapped(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if f" {path}\n" in maps.read_text(errors="replace"):
                return True
    return False


def _status(process: int) -> tuple[str, int]:
    try:
        # The second field, the command, is in parentheses and may hold spaces.
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[1])
    except (OSError, IndexError):
        return "X", 0
