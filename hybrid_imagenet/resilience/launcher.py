"""Ends a rank whose launcher has died."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from hybrid_imagenet.comm.environment import RANK_VARIABLE, placement
from hybrid_imagenet.errors import EXIT_FAILURE, UserError
from hybrid_imagenet.resilience import processes

_GRACE = 8.0  # seconds for saving after the launcher is gone


def launcher_rank() -> int:
    """Returns the rank that the launcher announced; 0 without one, or if that cannot be read."""
    with contextlib.suppress(UserError):
        return placement().rank
    return 0


def follow_launcher() -> None:
    """Ends this rank when its launcher has died, from a daemon thread: first by SIGTERM, so that it
    saves if it can.

    Does nothing in a process that no launcher started: that may outlive the shell that started it.
    """
    if RANK_VARIABLE not in os.environ:
        return
    launchers = _launchers()

    def follow() -> None:
        while all(processes.parent(process) == parent for process, parent in launchers):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _launchers() -> list[tuple[int, int]]:
    """Returns the (process, parent) pairs to watch: this one, and mpirun where horovodrun's shell
    waits for it.

    The parent of an mpirun that a user started may go: with nohup it outlives the login.
    """
    own, parent = os.getpid(), os.getppid()
    above = processes.parent(parent)
    words = processes.words(above)
    if len(words) > 2 and words[1] == "-c" and words[2].lstrip().startswith("mpirun "):
        return [(own, parent), (parent, above)]
    return [(own, parent)]
