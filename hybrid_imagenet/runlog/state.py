"""Determines the state of a run, for reports and commands alike."""

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

RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
KILLED = "killed"
DIVERGED = "diverged"
FAILED = "failed"
UNKNOWN = "unknown"
# A run on another host counts as killed after this time without a record.
_MAX_SILENT_SECONDS = 1800.0


def run_state(
    directory: pathlib.Path,
    records: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    host: str,
) -> str:
    """Returns the state of a run.

    A held lock shows that the run is running, on this host or on a file system that shares locks
    between hosts. Otherwise the last record shows how the run ended: it diverged, or failed with an
    error. A run without an end was killed if it ran on this host, which would see its lock, or if
    it has written nothing for half an hour.

    Args:
      directory: Directory of the run.
      records: The records of its metrics.jsonl.
      summary: Its summary.json if `describes_last_session` is true, else empty.
      host: Host of rank 0, as in config.json.
    """
    if files.lock_holder(directory) is not None:
        return RUNNING
    last_kind = records[-1].get("kind") if records else None
    if last_kind in (DIVERGED, FAILED):
        return str(last_kind)
    if summary:
        return STOPPED if summary.get("stop") == "preempted" else FINISHED
    is_this_host = host in ("", socket.gethostname())
    if is_this_host or time.time() - last_write(directory) > _MAX_SILENT_SECONDS:
        return KILLED
    return UNKNOWN


def describes_last_session(
    summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> bool:
    """Returns whether a summary was written by the last session.

    A resumed run keeps the summary of the previous session until it ends.
    """
    last_step = next((record["step"] for record in reversed(records) if record.get("step")), 0)
    return bool((summary.get("steps") or 0) >= last_step)


def next_command(state: str, directory: pathlib.Path) -> str:
    """Returns the command that continues or stops a run, or "" for a finished run."""
    run = shlex.quote(os.fspath(directory))
    return {
        RUNNING: f"hybrid-imagenet stop {run}",
        STOPPED: f"hybrid-imagenet resume {run}",
        KILLED: f"hybrid-imagenet resume {run}",
        DIVERGED: f"hybrid-imagenet resume {run}, with a lower learning rate",
        FAILED: f"hybrid-imagenet resume {run}, after you have removed the cause of the error",
        UNKNOWN: f"hybrid-imagenet resume {run}, if it no longer runs on its host",
    }.get(state, "")


def last_write(directory: pathlib.Path) -> float:
    """Returns when the run last wrote a record or its config.json, in seconds since 1970."""
    times = []
    for name in ("metrics.jsonl", "config.json"):
        with contextlib.suppress(OSError):
            times.append((directory / name).stat().st_mtime)
    return max(times, default=0.0)


def stop(directory: pathlib.Path) -> None:
    """Asks a run on this host to save and stop, as SIGTERM does.

    Raises:
      UserError: If it is not running, or this process cannot signal it.
    """
    holder = files.lock_holder(directory)
    if holder is None:
        raise UserError(
            f"{directory} is not running on this host. See hybrid-imagenet status {directory}."
        )
    host, _, process = holder.partition(" ")
    if host != socket.gethostname():
        raise UserError(
            f"{directory} is running on {host or 'another host'}. Stop it there with kill -TERM"
            f" {process or 'PROCESS'}."
        )
    # In a container, the number may belong to another process. So signal it only if it has the lock
    # file open.
    if not files.process_has_open(process, directory / "lock"):
        raise UserError(
            f"{directory}: process {process or '?'} cannot be signaled from here. Stop it in its"
            " container."
        )
    os.kill(int(process), signal.SIGTERM)
