"""Ends a rank whose launcher has died."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping

from hybrid_imagenet.comm.environment import RANK_VARIABLES, placement
from hybrid_imagenet.errors import EXIT_FAILURE, UserError
from hybrid_imagenet.resilience import processes

_GRACE = 8.0  # seconds for saving after the launcher is gone


def launcher_rank(environ: Mapping[str, str] | None = None) -> int:
    """Returns the rank that the launcher announced; 0 without one, or if it is not a number."""
    env = os.environ if environ is None else environ
    given = next((env[name] for name in RANK_VARIABLES if name in env), None)
    if given is None:
        with contextlib.suppress(UserError):
            return placement(env).rank
    return int(given) if given is not None and given.isascii() and given.isdigit() else 0


def follow_launcher(environ: Mapping[str, str] | None = None) -> None:
    """Ends this rank when its launcher has died, from a daemon thread: first by SIGTERM, so that it saves if it can.

    Does nothing in a process that no launcher started: that may outlive the shell that started it.
    """
    env = os.environ if environ is None else environ
    if not any(name in env for name in RANK_VARIABLES):
        return
    launchers = _launchers()

    def follow() -> None:
        while all(processes.parent(process) == parent for process, parent in launchers):
            time.sleep(1)
        _leave()

    _thread(follow)


def _thread(what) -> None:  # type: ignore[no-untyped-def]
    threading.Thread(target=what, name="launcher", daemon=True).start()


def _leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(EXIT_FAILURE)


def _launchers() -> list[tuple[int, int]]:
    """Returns the (process, parent) pairs to watch: this one, and mpirun where horovodrun's shell waits for it.

    The parent of an mpirun that a user started may go: with nohup it outlives the login.
    """
    own, parent = os.getpid(), os.getppid()
    above = processes.parent(parent)
    words = processes.words(above)
    if len(words) > 2 and words[1] == "-c" and words[2].lstrip().startswith("mpirun "):
        return [(own, parent), (parent, above)]
    return [(own, parent)]
