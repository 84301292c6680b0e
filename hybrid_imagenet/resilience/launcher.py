"""Ends a rank whose launcher has died."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hybrid_imagenet.errors import EXIT_FAILURE

_GRACE = 8.0  # seconds for saving after the launcher is gone
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK")


def follow_launcher(environ: Mapping[str, str] | None = None) -> None:
    """Ends this rank when its launcher has died, from a daemon thread: first by SIGTERM, so that it saves if it can.

    Does nothing in a process that no launcher started: that may outlive the shell that started it.
    """
    env = os.environ if environ is None else environ
    if not any(name in env for name in LAUNCHER_VARIABLES):
        return
    launchers = _launchers()

    def follow() -> None:
        while all(_parent(process) == parent for process, parent in launchers):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _launchers() -> list[tuple[int, int]]:
    """Processes and their parents that must stay so: this one, and mpirun where horovodrun's shell waits for it.

    The parent of an mpirun that a user started may go: with nohup it outlives the login.
    """
    own, parent = os.getpid(), os.getppid()
    try:
        above = _parent(parent)
        words = Path(f"/proc/{above}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no /proc, or gone already
        return [(own, parent)]
    if len(words) > 2 and words[1] == b"-c" and words[2].lstrip().startswith(b"mpirun "):
        return [(own, parent), (parent, above)]
    return [(own, parent)]


def _parent(process: int) -> int:
    """The number of a process's parent; 0 if there is no such process."""
    if process == os.getpid():
        return os.getppid()
    try:
        # The second field, the command, is in parentheses and may hold spaces.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
