"""Ends a rank whose launcher has died or cannot be reached, and hears from it when the job is to stop."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping

from hybrid_imagenet.comm.environment import RANK_VARIABLES
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_STALLED
from hybrid_imagenet.resilience import processes
from hybrid_imagenet.resilience.reaper import Guardian

_GRACE = 8.0  # seconds for saving after the launcher is gone
_CALL_EVERY = 5.0  # seconds between calls of an elastic rank to its launcher, and for one of them
_CALLS = 6  # that fail one after the other: the launcher has gone on without this rank
ORDERS_VARIABLE = "HYBRID_IMAGENET_ORDERS"  # "stdin": the launcher writes to standard input, and holds it open
_AFTER_VERDICT = 5.0  # seconds that the watchdogs of the other ranks have to name a rank before it is killed
_STOP, _END = b"stop", b"end"  # the orders: save and leave; leave, as the job has failed


def launcher_rank(environ: Mapping[str, str] | None = None) -> int:
    """Returns the rank that the launcher announced; 0 without one, or if it is not a number."""
    env = os.environ if environ is None else environ
    given = next((env[name] for name in RANK_VARIABLES if name in env), "0")
    return int(given) if given.isascii() and given.isdigit() else 0


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
    if env.get(ORDERS_VARIABLE) == "stdin":
        _thread(_obey)
    address = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if env.get("HOROVOD_ELASTIC") == "1" and all(address):
        _thread(lambda: _call(str(address[0]), int(str(address[1]))))


def guardian(stall_seconds: float, environ: Mapping[str, str] | None = None) -> Guardian | None:
    """Returns what kills this rank some seconds after the job has ended if it is stopped as a whole.

    mpirun's daemons kill such a rank. The launcher for Gloo cannot: a rank on another host ends by itself, or not.
    None where mpirun does it, and if `stall_seconds` is 0.
    """
    env = os.environ if environ is None else environ
    if env.get(ORDERS_VARIABLE) != "stdin" or not stall_seconds:
        return None
    return Guardian(stall_seconds + _AFTER_VERDICT)


def _thread(what) -> None:  # type: ignore[no-untyped-def]
    threading.Thread(target=what, name="launcher", daemon=True).start()


def _leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(EXIT_FAILURE)


def _obey() -> None:
    """Reads the launcher's orders from standard input, which ends with the launcher or with the way to it."""
    while order := os.read(0, 1 << 10):
        if _STOP in order:
            os.kill(os.getpid(), signal.SIGUSR1)
        if _END in order:
            os._exit(EXIT_FAILURE)
    _leave()


def _call(host: str, port: int) -> None:
    """Ends an elastic rank that cannot reach its launcher: its host has lost the network and counts as lost."""
    failed = 0
    while failed < _CALLS:
        time.sleep(_CALL_EVERY)
        try:
            socket.create_connection((host, port), timeout=_CALL_EVERY).close()
            failed = 0
        except OSError:
            failed += 1
    where = f"rank {launcher_rank()} on {socket.gethostname()}"
    print(f"error: {where} cannot reach its launcher at {host}:{port}: this rank ends", file=sys.stderr, flush=True)
    os._exit(EXIT_STALLED)


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
