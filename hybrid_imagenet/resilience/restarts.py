"""Restarts a job after it has lost a rank or a host (`hybrid-imagenet run`).

An attempt is one launch of all ranks. If it ends with a code that another start can fix, the job
continues from its latest checkpoint on the hosts that are available, with as many ranks as they
have slots. Hosts that join later also cause a restart, after the ranks have saved.
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
    pluralize,
)
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.resilience.supervisor import Supervisor
from hybrid_imagenet.startup import COMMAND_START_VARIABLE, timestamp

# Another start would not change the result of these.
_FINAL_CODES = (EXIT_OK, EXIT_USAGE, EXIT_NUMERICS, EXIT_PREEMPTED, EXIT_INTERRUPTED)
# Time between two checks of the hosts or of a lock.
_CHECK_SECONDS = 0.5
# The last record of metrics.jsonl is within this many bytes of its end.
_MAX_TAIL_BYTES = 1 << 16
_NO_STEP = -1
# After this many failures in a row at the same place, the step itself must be the cause. Two are
# not enough: metrics.jsonl has a record every --log_every_steps only, so two unrelated losses can
# look the same.
_MAX_FAILURES_AT_ONE_STEP = 3


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When a job starts again.

    Attributes:
      max_restarts: Number of restarts after a loss.
      min_ranks: With fewer slots than this the job waits for hosts.
      max_ranks: Largest number of ranks.
      wait_seconds: How long to wait for `min_ranks` slots, or for the lock of the run directory.
      join_seconds: How long an attempt runs at least before hosts that have joined end it.
    """

    max_restarts: int
    min_ranks: int
    max_ranks: int
    wait_seconds: float
    join_seconds: float


class RestartLoop:
    """Runs attempts until one ends with a code that another start would not change."""

    def __init__(
        self,
        policy: RestartPolicy,
        hosts: Callable[[], Mapping[str, int]],
        start: Callable[[Mapping[str, int], int, bool], Supervisor],
        run_directory: pathlib.Path | None,
    ) -> None:
        """Stores how attempts are made.

        Args:
          policy: When the job starts again.
          hosts: Returns the slots of each host that answers.
          start: Returns the supervisor of an attempt; its arguments are the slots of each host, the
            number of ranks, and whether to resume a run.
          run_directory: Directory of the training; None for a program that keeps its state
            elsewhere.
        """
        self._policy = policy
        self._hosts = hosts
        self._start = start
        self._run_directory = run_directory
        # Whether the current attempt was stopped because hosts have joined.
        self._was_stopped_for_hosts = False
        # Whether the program itself has ended the last attempt, by an exception or `sys.exit`.
        self._has_failed = False
        # Hosts of the last attempt that could start.
        self._proven_hosts: set[str] = set()
        self._excluded_hosts: set[str] = set()

    def run(self) -> int:
        """Returns the exit code of the last attempt."""
        restarts = 0
        failed_at: tuple[int, int] | None = None
        failures_at_one_step = 0
        while True:
            slots = self._wait_for_hosts()
            if slots is None:
                return EXIT_PREEMPTED if REQUESTS.stop else EXIT_STALLED
            is_first = not self._proven_hosts
            if not is_first:
                self._wait_for_lock()
                if REQUESTS.stop:
                    return EXIT_PREEMPTED
                # The ranks report the duration of their startup: it begins with this attempt.
                os.environ[COMMAND_START_VARIABLE] = timestamp()
            # A run that existed before the first attempt is not resumed unless the user asks. Later
            # the flag is also passed if the run is not seen here, but on the host of rank 0.
            code = self._attempt(slots, resume=not is_first)
            if REQUESTS.stop:
                return code
            if code != EXIT_USAGE:
                self._proven_hosts = set(slots)
            elif self._exclude_new_hosts(slots):
                continue
            if self._was_stopped_for_hosts and code == EXIT_PREEMPTED:
                continue
            if code in _FINAL_CODES:
                return code
            is_script_failure = self._has_failed and self._run_directory is None
            if is_script_failure and code != EXIT_STALLED:
                _print_error(
                    "error: The job does not start again, because its program itself has failed."
                    " Correct the program, or catch the exception if it should continue."
                )
                return code
            last_step = self._last_step()
            saved_step = self._latest_checkpoint()
            if not self._may_be_caused_by_step(code, last_step, saved_step):
                failures_at_one_step = 0
            elif (last_step, saved_step) == failed_at:
                failures_at_one_step += 1
            else:
                failures_at_one_step = 1
            failed_at = (last_step, saved_step)
            if failures_at_one_step == _MAX_FAILURES_AT_ONE_STEP:
                _print_error(
                    f"error: The job failed {failures_at_one_step} times in a row after the record"
                    f" of step {last_step}, without a new checkpoint (exit code {code}). It does"
                    " not start again, because it would probably fail there once more."
                )
                return code
            if restarts == self._policy.max_restarts:
                return code
            restarts += 1
            source = ""
            if saved_step != _NO_STEP:
                source = f", from the checkpoint of step {saved_step}"
            _print_error(
                f"restart {restarts} of {self._policy.max_restarts} (exit code {code}){source}"
            )

    def _exclude_new_hosts(self, slots: Mapping[str, int]) -> bool:
        """Excludes the hosts on which the job has never started; returns whether there are any.

        Returns False if the job has never started at all, because then the hosts need not be the
        cause.
        """
        new_hosts = set(slots) - self._proven_hosts
        if not new_hosts or not self._proven_hosts:
            return False
        names = ", ".join(sorted(new_hosts))
        _print_error(f"continuing without {names}, where the job could not start")
        self._excluded_hosts |= new_hosts
        return True

    def _may_be_caused_by_step(self, code: int, last_step: int, saved_step: int) -> bool:
        """Returns whether the step itself may be the cause of a failure.

        A killed or lost rank does not show that before a step beyond the checkpoint. Nothing is
        known about the steps of a program that keeps its state elsewhere.
        """
        if self._run_directory is None:
            return False
        return last_step > saved_step or code == EXIT_FAILURE

    def _attempt(self, slots: Mapping[str, int], *, resume: bool) -> int:
        """Returns an attempt's exit code."""
        ranks = min(self._policy.max_ranks, sum(slots.values()))
        job = self._start(slots, ranks, resume)
        ended = threading.Event()
        self._was_stopped_for_hosts = False
        thread = threading.Thread(
            target=self._watch_for_hosts, args=(job, ranks, ended), name="hosts", daemon=True
        )
        thread.start()
        try:
            return job.run()
        finally:
            self._has_failed = job.has_failed
            ended.set()
            thread.join()

    def _watch_for_hosts(self, job: Supervisor, ranks: int, ended: threading.Event) -> None:
        """Has an attempt save and end once hosts have joined that have room for more ranks."""
        if ranks == self._policy.max_ranks or ended.wait(self._policy.join_seconds):
            return
        while not ended.wait(_CHECK_SECONDS):
            slots = sum(self._usable_hosts().values())
            if slots > ranks and self._can_continue():
                self._was_stopped_for_hosts = True
                job.ask_to_stop(
                    f"{slots} slots instead of {ranks}: the ranks save and start again on more"
                    " hosts"
                )
                return

    def _can_continue(self) -> bool:
        """Returns whether another attempt would continue this one instead of beginning again."""
        return self._run_directory is None or self._latest_checkpoint() != _NO_STEP

    def _wait_for_hosts(self) -> dict[str, int] | None:
        """Returns the hosts as soon as they have slots for enough ranks.

        Returns None if that takes too long, or after a signal.
        """
        deadline = time.monotonic() + self._policy.wait_seconds
        has_printed = False
        while True:
            hosts = self._usable_hosts()
            slots = sum(hosts.values())
            if slots >= self._policy.min_ranks:
                return hosts
            if REQUESTS.stop:
                return None
            if time.monotonic() > deadline:
                _print_error(
                    f"error: The hosts have only {pluralize(slots, 'slot')} after"
                    f" {self._policy.wait_seconds:g} s (--min_np={self._policy.min_ranks}). Check"
                    " the hosts, or set --min_np or --host_timeout."
                )
                return None
            if not has_printed:
                _print_error(
                    f"waiting for hosts: {pluralize(slots, 'slot')} available"
                    f" (--min_np={self._policy.min_ranks})"
                )
                has_printed = True
            time.sleep(_CHECK_SECONDS)

    def _usable_hosts(self) -> dict[str, int]:
        return {
            host: slots for host, slots in self._hosts().items() if host not in self._excluded_hosts
        }

    def _wait_for_lock(self) -> None:
        """Waits until no rank of an earlier attempt locks the run directory.

        If the lock stays, the job itself will report it.
        """
        if self._run_directory is None:
            return
        deadline = time.monotonic() + self._policy.wait_seconds
        while (
            files.lock_holder(self._run_directory) is not None
            and time.monotonic() < deadline
            and not REQUESTS.stop
        ):
            time.sleep(_CHECK_SECONDS)

    def _latest_checkpoint(self) -> int:
        """Returns the step of the latest checkpoint, or -1 if there is none."""
        if self._run_directory is None:
            return _NO_STEP
        paths = CheckpointFolder(self._run_directory / "checkpoints", _print_error).paths()
        return step_of(paths[0]) if paths else _NO_STEP

    def _last_step(self) -> int:
        """Returns the step of the last record in metrics.jsonl, or -1 if there is none."""
        if self._run_directory is None:
            return _NO_STEP
        with (
            contextlib.suppress(OSError),
            (self._run_directory / "metrics.jsonl").open("rb") as file,
        ):
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_TAIL_BYTES))
            for line in reversed(file.read().splitlines()):
                # The last line is cut short if its rank was killed, and other records may have no
                # step.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return int(json.loads(line)["step"])
        return _NO_STEP


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
