"""Ends a rank whose launcher has died."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from hybrid_imagenet.cluster.environment import RANK_VARIABLE, read_placement
from hybrid_imagenet.errors import EXIT_FAILURE, UserError
from hybrid_imagenet.resilience import processes

# How long a rank may save after its launcher has died.
_SAVE_SECONDS = 8.0
_CHECK_SECONDS = 1.0


def launcher_rank() -> int:
    """Returns the rank in the launcher's variables, or 0 if they are missing or not valid."""
    with contextlib.suppress(UserError):
        return read_placement().rank
    return 0


def follow_launcher() -> None:
    """Starts a thread that ends this rank when its launcher has died.

    The rank gets SIGTERM first, so that it saves if it can. A process without a launcher is not
    watched, because it may outlive the shell that started it.
    """
    if RANK_VARIABLE not in os.environ:
        return
    watched = _processes_and_parents()

    def follow() -> None:
        while all(processes.parent(process) == parent for process, parent in watched):
            time.sleep(_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SAVE_SECONDS)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _processes_and_parents() -> list[tuple[int, int]]:
    """Returns (process, parent) pairs that change when the launcher dies.

    The first pair is this process. If the launcher is an mpirun that a shell of horovodrun waits
    for, the second one is mpirun. The parent of an mpirun that a user started is not watched: with
    nohup, mpirun outlives the login.
    """
    process = os.getpid()
    parent = os.getppid()
    grandparent = processes.parent(parent)
    words = processes.command_line(grandparent)
    if len(words) > 2 and words[1] == "-c" and words[2].lstrip().startswith("mpirun "):
        return [(process, parent), (parent, grandparent)]
    return [(process, parent)]
