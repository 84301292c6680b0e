"""Starts a job again after it has lost a rank or a host, on the hosts that are there
(`hybrid-imagenet run`).

An attempt is one launch of all ranks. When it ends with a code that another start can mend, the job
continues from its newest checkpoint, on as many ranks as there are slots. Before hosts that have
joined cause a restart, the ranks save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping

from hybrid_imagenet import files
from hybrid_imagenet.checkpoints.store import CheckpointFolder, step_of
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_NUMERICS,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
)
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.resilience.supervisor import Supervisor
from hybrid_imagenet.startup import COMMAND_START_VARIABLE, timestamp

_FINAL = (EXIT_OK, EXIT_USAGE, EXIT_NUMERICS, EXIT_PREEMPTED, EXIT_INTERRUPTED)
_LOOK = 0.5  # seconds between two looks at hosts or a lock
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl that hold its last record


@dataclasses.dataclass(frozen=True)
class Policy:
    """When a job starts again.

    Attributes:
      restarts: starts after a loss, at most.
      least: ranks without which the job waits.
      most: ranks at most.
      wait: seconds to wait for `least` ranks, or for the lock of the run directory.
      interval: seconds that an attempt lasts at least before hosts which have joined end it.
    """

    restarts: int
    least: int
    most: int
    wait: float
    interval: float


class Restarts:
    """Runs attempts until one ends for good."""

    def __init__(
        self,
        policy: Policy,
        hosts: Callable[[], Mapping[str, int]],
        start: Callable[[Mapping[str, int], int, bool], Supervisor],
        run_dir: pathlib.Path | None,
    ) -> None:
        """Takes what an attempt needs.

        Args:
          policy: when the job starts again.
          hosts: gives the slots of each host that answers.
          start: makes a job of the slots by host, a number of ranks, and whether a run is to be
          resumed.
          run_dir: of the training; None for a program that keeps its state elsewhere.
        """
        self._policy, self._hosts, self._start, self._run_dir = policy, hosts, start, run_dir
        self._joined = False
        self._worked: set[str] = set()  # hosts of the last attempt that could start
        self._left_out: set[str] = set()

    def run(self) -> int:
        """Returns the exit code of the last attempt."""
        done, failed_at = 0, -2
        while True:
            slots = self._wait_for_hosts()
            if slots is None:
                return EXIT_PREEMPTED if REQUESTS.stop else EXIT_STALLED
            again = bool(self._worked)
            if again:
                self._wait_for_lock()
                os.environ[COMMAND_START_VARIABLE] = (
                    timestamp()
                )  # what a rank says of its start is of this attempt
            code = self._attempt(slots, resume=again and self._holds_a_run())
            if REQUESTS.stop:
                return code
            if code != EXIT_USAGE:
                self._worked = set(slots)
            elif (new := set(slots) - self._worked) and self._worked:
                _say(f"omits {', '.join(sorted(new))}: the job could not start there")
                self._left_out |= new
                continue
            if self._joined and code == EXIT_PREEMPTED:
                continue
            if code in _FINAL:
                return code
            step, saved = self._last_step(), self._newest_checkpoint()
            if (
                self._run_dir is not None
                and step == failed_at
                and (step > saved or code == EXIT_FAILURE)
            ):
                _say(
                    f"error: the job failed at step {step} again (exit code {code}): another start"
                    " would not help"
                )
                return code
            if done == self._policy.restarts:
                return code
            failed_at, done = step, done + 1
            place = f", from the checkpoint of step {saved}" if saved >= 0 else ""
            _say(f"restart {done} of {self._policy.restarts} (exit code {code}){place}")

    def _attempt(self, slots: Mapping[str, int], *, resume: bool) -> int:
        """Returns an attempt's exit code."""
        ranks = min(self._policy.most, sum(slots.values()))
        job, ended = self._start(slots, ranks, resume), threading.Event()
        self._joined = False
        watch = threading.Thread(
            target=self._watch, args=(job, ranks, ended), name="hosts", daemon=True
        )
        watch.start()
        try:
            return job.run()
        finally:
            ended.set()
            watch.join()

    def _watch(self, job: Supervisor, ranks: int, ended: threading.Event) -> None:
        """Ends an attempt, saved, once hosts have joined that make room for more ranks."""
        if ranks == self._policy.most or ended.wait(self._policy.interval):
            return
        while not ended.wait(_LOOK):
            slots = sum(self._usable().values())
            if slots > ranks and (self._run_dir is None or self._newest_checkpoint() >= 0):
                self._joined = True
                job.ask_to_stop(
                    f"{slots} slots in place of {ranks}: the ranks save and start again on more"
                    " hosts"
                )
                return

    def _wait_for_hosts(self) -> dict[str, int] | None:
        """Returns the hosts once there are slots for enough ranks; None if that takes too long, or
        after a signal.
        """
        until, told = time.monotonic() + self._policy.wait, False
        while sum((slots := self._usable()).values()) < self._policy.least:
            have = sum(slots.values())
            if REQUESTS.stop:
                return None
            if time.monotonic() > until:
                _say(
                    f"error: {have} slots after {self._policy.wait:g} s, and"
                    f" --min_np={self._policy.least}"
                )
                return None
            if not told:
                _say(f"waiting for hosts: {have} slots, and --min_np={self._policy.least}")
                told = True
            time.sleep(_LOOK)
        return slots

    def _usable(self) -> dict[str, int]:
        return {host: slots for host, slots in self._hosts().items() if host not in self._left_out}

    def _wait_for_lock(self) -> None:
        """Waits until no rank of an earlier attempt holds the run directory; one that stays is left
        to the job.
        """
        if self._run_dir is None:
            return
        until = time.monotonic() + self._policy.wait
        while (
            files.lock_holder(self._run_dir) is not None
            and time.monotonic() < until
            and not REQUESTS.stop
        ):
            time.sleep(_LOOK)

    def _holds_a_run(self) -> bool:
        return self._run_dir is not None and (self._run_dir / "config.json").exists()

    def _newest_checkpoint(self) -> int:
        """The step of the newest checkpoint; -1 without one."""
        if self._run_dir is None:
            return -1
        paths = CheckpointFolder(self._run_dir / "checkpoints", _say).paths()
        return step_of(paths[0]) if paths else -1

    def _last_step(self) -> int:
        """The step of the last record; -1 without one."""
        if self._run_dir is None:
            return -1
        with contextlib.suppress(OSError), (self._run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(
                    ValueError, KeyError, TypeError
                ):  # cut short when its rank was killed
                    return int(json.loads(line)["step"])
        return -1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
