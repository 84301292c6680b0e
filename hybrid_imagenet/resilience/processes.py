"""Finds and kills processes of this host, with the help of /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# Younger shared memory is kept, because its rank may be about to map it.
_MIN_AGE_SECONDS = 5.0


def parent(process: int) -> int:
    """Returns the number of a process's parent, or 0 if there is no such process."""
    _, number = _state_and_parent(process)
    return number


def session(process: int) -> int:
    """Returns the session of a process, or 0 if there is no such process."""
    try:
        return os.getsid(process)
    except ProcessLookupError:
        return 0


def descendants(process: int) -> list[int]:
    """Returns the children of a process, their children and so on, without ended ones."""
    children_of: dict[int, list[int]] = {}
    ended = set()
    for number in _all_processes():
        state, parent_number = _state_and_parent(number)
        children_of.setdefault(parent_number, []).append(number)
        if state in "ZX":
            ended.add(number)
    all_descendants: list[int] = []
    queue = list(children_of.get(process, ()))
    while queue:
        number = queue.pop()
        all_descendants.append(number)
        queue += children_of.get(number, ())
    return [number for number in all_descendants if number not in ended]


def children(process: int) -> list[int]:
    """Returns the direct children of a process, in ascending order."""
    return sorted(number for number in _all_processes() if parent(number) == process)


def command_line(process: int) -> list[str]:
    """Returns the words of a process's command line; [""] if there is no such process."""
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
    """Removes shared memory of Open MPI that the ranks of a killed launcher have left.

    Each rank leaves 4 MiB. Files that a process maps are kept, and those that were written in the
    last seconds.

    Args:
      since: Start of the job in seconds since 1970; older files may belong to another job.
      within: Directory of the files.
    """
    for path in within.glob(f"vader_segment.{socket.gethostname()}.{os.getuid()}.*"):
        with contextlib.suppress(OSError):
            modified = path.stat().st_mtime
            is_settled = modified < time.time() - _MIN_AGE_SECONDS
            if modified >= since and is_settled and not _is_mapped(str(path)):
                path.unlink()


def _is_mapped(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # The process may have ended meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            if f" {path}\n" in maps.read_text(errors="replace"):
                return True
    return False


def _all_processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _state_and_parent(process: int) -> tuple[str, int]:
    """Returns the state letter of a process and its parent; ("X", 0) if there is no such process.

    See proc(5): "Z" is a zombie, "X" a dead process.
    """
    try:
        # The second field, the command, is in parentheses and may contain spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[1])
    except (OSError, IndexError):
        return "X", 0
