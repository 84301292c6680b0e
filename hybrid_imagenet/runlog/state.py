"""Tells the state of a run: the only place that does, for reports and commands alike."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError

RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"
KILLED, DIVERGED, UNKNOWN = "killed", "diverged", "unknown"
_SILENT = 1800.0  # seconds without a record after which a run on another host counts as killed


def run_state(
    directory: pathlib.Path,
    records: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    host: str,
) -> str:
    """Returns the state of a run.

    Its lock shows that it runs, on this host and on file systems that carry locks to others.
    Otherwise its last record tells how it ended. A run without an end was killed, if this host
    would have seen its lock, or after half an hour without a record.

    Args:
      directory: of the run.
      records: of its metrics.jsonl.
      summary: its summary.json, as far as `current` says so; empty without one.
      host: of rank 0, as config.json names it.
    """
    if files.lock_holder(directory) is not None:
        return RUNNING
    if records and records[-1].get("kind") == "diverged":
        return DIVERGED
    if summary:
        return STOPPED if summary.get("stop") == "preempted" else FINISHED
    seen = host in ("", socket.gethostname())
    return KILLED if seen or time.time() - last_write(directory) > _SILENT else UNKNOWN


def describes_last_session(
    summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether a summary is of the last session: a resumed run leaves the one of the session before
    until it ends.
    """
    last = next((record["step"] for record in reversed(records) if record.get("step")), 0)
    return bool((summary.get("steps") or 0) >= last)


def next_command(state: str, directory: pathlib.Path) -> str:
    """Returns the command that continues or stops a run in this state; empty for a finished one."""
    run = shlex.quote(os.fspath(directory))
    return {
        RUNNING: f"hybrid-imagenet stop {run}",
        STOPPED: f"hybrid-imagenet resume {run}",
        KILLED: f"hybrid-imagenet resume {run}",
        DIVERGED: f"hybrid-imagenet resume {run}, with a lower learning rate",
        UNKNOWN: f"hybrid-imagenet resume {run}, if it no longer runs on its host",
    }.get(state, "")


def last_write(directory: pathlib.Path) -> float:
    """Returns when the run last wrote a record, or its config.json, in seconds since 1970."""
    times = []
    for name in ("metrics.jsonl", "config.json"):
        with contextlib.suppress(OSError):
            times.append((directory / name).stat().st_mtime)
    return max(times, default=0.0)


def stop(directory: pathlib.Path) -> None:
    """Asks a run on this host to save and stop, as SIGTERM does.

    Raises:
      UserError: if it does not run, or not where this process can signal it.
    """
    holder = files.lock_holder(directory)
    if holder is None:
        raise UserError(
            f"{directory}: does not run on this host; see hybrid-imagenet status {directory}"
        )
    host, _, process = holder.partition(" ")
    if host != socket.gethostname():
        raise UserError(
            f"{directory}: runs on {host or 'another host'}; there: kill -TERM"
            f" {process or 'PROCESS'}"
        )
    # In a container the number may be another process's: only the one that has the lock's file open
    # is signalled.
    if not files.process_has_open(process, directory / "lock"):
        raise UserError(
            f"{directory}: process {process or '?'} cannot be reached from here; stop it in its"
            " container"
        )
    os.kill(int(process), signal.SIGTERM)
