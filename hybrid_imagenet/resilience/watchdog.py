"""Reports ranks that hang, and ends the job if they do not recover.

Horovod's own stall inspector needs an answer of every rank's background thread. A rank that is
stopped, or whose host is lost, blocks it too. Here a thread of each rank sends heartbeats in small
UDP datagrams, outside the collectives that hang. Two ranks listen: rank 0 and a deputy, on another
host if there is one. A heartbeat contains the Python stack of the sender's main thread, so the last
one of a rank shows what it was doing.

The heartbeats need connected ranks, but a dead mount or a stopped rank can block a job before that.
So another thread of each rank (`watch_startup`) watches the stages of its startup
(`startup.STARTUP_PROGRESS`) until the first training step is done, and reports them to the
supervisor (`startup_tracker`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType

from hybrid_imagenet.cluster.hosts import interfaces
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.errors import EXIT_USAGE
from hybrid_imagenet.resilience import startup_tracker
from hybrid_imagenet.resilience.exit_code import end_process, exit_stalled
from hybrid_imagenet.resilience.heartbeats import MAX_DATAGRAM_BYTES, Heartbeat, HeartbeatLog
from hybrid_imagenet.resilience.stacks import main_stack, path_in_stack
from hybrid_imagenet.startup import StartupProgress

# A rank is reported after this time, or half of --stall_timeout if that is less.
_MAX_REPORT_SECONDS = 30.0
# A rank that does not advance ends itself this long after --stall_timeout, because by then the
# listeners should have ended the job and have not.
_LISTENER_GRACE_SECONDS = 15.0
_MAX_DATAGRAMS_PER_CHECK = 1000
_MAX_NAMED_RANKS = 3
# Random share of the interval by which heartbeats are moved. Of 4,096 that arrive at the same
# moment, a socket's queue holds only about 300.
_INTERVAL_SPREAD = 0.2
# A generator for this module, so that a user's seeded one is not changed.
_random = random.Random()

_STARTUP_CHECK_SECONDS = 0.5
# A startup stage may last this many times --stall_timeout.
_STAGE_FACTOR = 2.0
_SLOW_STAGE_FACTOR = 6.0
# Stages that read every file name of a dataset, or compile.
_SLOW_STAGES = ("reading the dataset", "building the model", "compiling the step")
# A stage may last at least this long, because imports take a while on a loaded host.
_MIN_STAGE_SECONDS = 60.0
# How much longer a stage may last in which no Python thread runs, as while TensorFlow connects its
# servers.
_NATIVE_CODE_GRACE_SECONDS = 15.0


# The watchdogs of this process whose threads run.
_started_watchdogs: list[Watchdog] = []


def record_progress() -> None:
    """Records at the watchdogs of this process that its rank has advanced, without a step.

    Work that the owner of a watchdog does not see, such as an evaluation inside a callback of
    `fit`, calls it.
    """
    for watchdog in tuple(_started_watchdogs):
        watchdog.record_progress()


def listener_ranks(hosts: Sequence[str]) -> tuple[int, ...]:
    """Returns rank 0 and its deputy: the first rank on another host, else rank 1.

    Args:
      hosts: The host of each rank.
    """
    if len(hosts) == 1:
        return (0,)
    return (0, next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1))


class Watchdog:
    """Exchanges heartbeats with the other ranks, and reports and ends ranks that hang.

    All of this happens in a daemon thread. A silent rank is reported on standard error after 30 s
    (or half of `stall_timeout` if that is less), with its host, process, last step and stack. If no
    rank advances, the culprits are reported. After `stall_timeout` the job stops with EXIT_STALLED.
    Before the first step, which compiles, only silence counts.
    """

    def __init__(
        self,
        communicator: Communicator,
        stall_timeout: float,
        *,
        waiting_modules: Sequence[ModuleType] = (),
        is_running: Callable[[], bool] = lambda: True,
        has_long_steps: bool = False,
        option: str = "--stall_timeout",
    ):
        """Exchanges addresses with the other ranks; every rank must call it.

        Args:
          communicator: Connects this rank with the others.
          stall_timeout: Seconds after which the job stops; 0 switches the watchdog off.
          waiting_modules: Modules in which a rank that has done its own work waits for the others,
            so it is not to blame.
          is_running: Returns whether the watched work is still running; if not, this rank leaves
            the watch even if `stop` is not called.
          has_long_steps: Whether a step may take longer than `stall_timeout`, such as an execution
            of many batches. A step may take a multiple of the mean step. With long steps, the mean
            includes the first one, and no shorter work.
          option: The user's name for `stall_timeout`, for messages.
        """
        self._rank = communicator.rank
        self._hosts = communicator.hosts
        self._stall_timeout = stall_timeout
        self._patience = min(_MAX_REPORT_SECONDS, stall_timeout / 2)
        self._interval = min(5.0, max(0.2, self._patience / 5))
        self._is_running = is_running
        self._has_long_steps = has_long_steps
        self._option = option
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        self._first_progress = time.monotonic()
        self._last_progress = self._first_progress
        # Number of calls that recorded progress after the first step; of all steps, if these are
        # long.
        self._progress_count = 0
        # Number of steps that have begun, and whether this rank has ended its steps.
        self._begun_steps = 0
        self._has_stopped = False
        self._reported_ranks: tuple[int, ...] = ()
        self._has_failed = False
        if stall_timeout:
            self._connect(communicator, waiting_modules)

    def _connect(self, communicator: Communicator, waiting_modules: Sequence[ModuleType]) -> None:
        is_one_host = len(set(self._hosts)) == 1
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("127.0.0.1" if is_one_host else "", 0))
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        self._token: str = communicator.broadcast_object(secrets.token_hex(16))
        addresses = [] if is_one_host else list(interfaces().values())
        port = self._socket.getsockname()[1]
        endpoints = communicator.allgather_object([addresses, port])
        waiting_paths = [path_in_stack(module) for module in waiting_modules]
        self._log = HeartbeatLog(self._patience, waiting_paths)
        self._listeners = listener_ranks(self._hosts)
        self._targets: list[tuple[str, int]] = []
        for rank in self._listeners:
            self._targets += self._targets_of(rank, *endpoints[rank])

    def _targets_of(self, rank: int, addresses: Sequence[str], port: int) -> list[tuple[str, int]]:
        """Returns the addresses and ports to which heartbeats for a listener are sent."""
        if rank == self._rank:
            return []
        if self._hosts[rank] == self._hosts[self._rank]:
            addresses = ["127.0.0.1"]
        return [(address, port) for address in addresses]

    def start(self) -> None:
        """Starts the thread."""
        if self._stall_timeout:
            self._due = time.monotonic() + _random.uniform(0, self._interval)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            _started_watchdogs.append(self)
            self._thread.start()

    def record_progress(self, step: int | None = None) -> None:
        """Records that this rank has advanced.

        Args:
          step: Number of the training step that has ended, or None after other work, such as a
            validation batch.
        """
        now = time.monotonic()
        if self._has_long_steps:
            if step is not None:
                self._progress_count += 1
        elif self._step is None:
            self._first_progress = now
        else:
            self._progress_count += 1
        if step is not None:
            self._step = step
        self._last_progress = now

    def record_begin(self, step: int) -> None:
        """Records that this rank begins a step, which is counted from 1."""
        self._begun_steps = step
        self._has_stopped = False

    def record_stop(self) -> None:
        """Records that this rank takes no step after its last one.

        If another rank has begun one, it would wait there forever, so the job stops.
        """
        self._has_stopped = True

    def stop(self) -> None:
        """Signs off at the listeners and ends the thread."""
        if self._thread is None:
            return
        self._stop.set()
        # The socket is closed if the thread has ended by itself.
        with contextlib.suppress(OSError):
            self._wakeup_writer.send(b".")
        self._thread.join()
        self._thread = None

    def _watch(self) -> None:
        """Sends heartbeats, listens and looks for stalls until `stop`, whatever is received."""
        while not self._stop.is_set():
            try:
                self._run_cycle()
            except Exception:
                # Continue, because a rank without its watchdog would soon count as silent.
                if not self._has_failed:
                    self._has_failed = True
                    _print_error(f"watchdog: continues after an error\n{traceback.format_exc()}")
                self._stop.wait(self._interval)
        self._close()

    def _run_cycle(self) -> None:
        """Listens until the next heartbeat is due, sends it and looks for stalls."""
        self._listen_until(self._due)
        if not self._is_running():
            self._stop.set()
        if self._stop.is_set():
            return
        now = time.monotonic()
        # If this process itself was stopped or got no processor, the others are not to blame for
        # the delay.
        delay = max(0.0, now - self._due)
        self._due = now + self._interval * _random.uniform(
            1 - _INTERVAL_SPREAD, 1 + _INTERVAL_SPREAD
        )
        self._log.forgive(delay)
        self._last_progress += delay
        heartbeat = self._heartbeat()
        self._send(heartbeat)
        self._log.record(heartbeat, now)
        self._receive_pending()
        if self._rank in self._listeners:
            self._check_stops()
            self._check_stall(now)
        limit = max(self._stall_timeout, self._log.longest_step_seconds())
        limit += _LISTENER_GRACE_SECONDS
        if heartbeat.step is not None and heartbeat.idle_seconds > limit:
            self._exit(
                f"rank {self._rank} on {heartbeat.host} made no progress for"
                f" {heartbeat.idle_seconds:.0f} s"
            )

    def _heartbeat(self, leaving: bool = False) -> Heartbeat:
        idle = 0.0
        if self._step is not None:
            idle = time.monotonic() - self._last_progress
        stepping = self._last_progress - self._first_progress
        return Heartbeat(
            rank=self._rank,
            host=self._hosts[self._rank],
            process=os.getpid(),
            step=self._step,
            idle_seconds=max(0.0, idle),
            mean_step_seconds=max(0.0, stepping) / max(self._progress_count, 1),
            stack=main_stack(),
            begun_steps=self._begun_steps,
            has_stopped=self._has_stopped,
            leaving=leaving,
        )

    def _send(self, heartbeat: Heartbeat) -> None:
        data = heartbeat.encode(self._token)
        for target in self._targets:
            # There may be no route to this address of the rank, or its queue may be full.
            with contextlib.suppress(OSError):
                self._socket.sendto(data, target)

    def _listen_until(self, deadline: float) -> None:
        """Receives datagrams as they come, so that a flood of others leaves room for heartbeats."""
        while not self._stop.is_set():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._selector.select(remaining)
            self._receive_pending()

    def _receive_pending(self) -> None:
        for _ in range(_MAX_DATAGRAMS_PER_CHECK):
            try:
                data = self._socket.recv(MAX_DATAGRAM_BYTES + 1)
            except OSError:
                # Nothing is pending, or a target has rejected an earlier datagram.
                return
            heartbeat = Heartbeat.decode(data, self._token, len(self._hosts))
            if heartbeat is not None:
                self._log.record(heartbeat, time.monotonic())

    def _check_stops(self) -> None:
        """Ends the job if some ranks have ended their steps and others have not."""
        stopped, running = self._log.find_separate_stop()
        if not running:
            return
        step = self._log.last_step(stopped[0])
        end_process(
            f"error: {self._names(stopped)} stopped after step {step} (stop_training), but"
            f" {self._names(running)} began the next step and would wait in it forever, so the job"
            " was stopped. Set stop_training on every rank at the same batch, for example by a"
            " value that hi.communicator().allreduce_sum has summed, or at the end of an epoch.",
            EXIT_USAGE,
        )

    def _names(self, ranks: Sequence[int]) -> str:
        names = [f"rank {rank} on {self._hosts[rank]}" for rank in ranks[:_MAX_NAMED_RANKS]]
        hidden = len(ranks) - len(names)
        return ", ".join(names) + (f" and {hidden} more" if hidden else "")

    def _check_stall(self, now: float) -> None:
        """Reports ranks that hang, once, and ends the job after `stall_timeout`.

        The deputy does this only while rank 0 is silent.
        """
        if self._rank and self._log.seconds_silent(0, now) <= self._patience:
            return
        stall = self._log.find_stall(now)
        if stall is None:
            self._reported_ranks = ()
            return
        this_rank = f"rank {self._rank} on {self._hosts[self._rank]}"
        # If the user can read the output of a deputy that hears no other rank, then the network of
        # the deputy itself has failed.
        number_of_others = len(self._hosts) - 1
        is_isolated = self._rank != 0 and len(stall.ranks) == number_of_others > 1
        if stall.ranks != self._reported_ranks:
            self._reported_ranks = stall.ranks
            if is_isolated:
                _print_error(f"stall: {this_rank} hears no other rank")
            else:
                _print_error(stall.report)
        if stall.seconds <= self._stall_timeout:
            return
        if is_isolated:
            self._exit(f"{this_rank} heard no other rank for {stall.seconds:.0f} s")
        ranks = ", ".join(f"{rank} on {self._hosts[rank]}" for rank in stall.ranks)
        self._exit(f"rank {ranks} hung for {stall.seconds:.0f} s")

    def _exit(self, reason: str) -> None:
        exit_stalled(
            f"error: {reason}, so the job was stopped ({self._option}={self._stall_timeout:g})."
        )

    def _close(self) -> None:
        _started_watchdogs.remove(self)
        self._send(self._heartbeat(leaving=True))
        self._selector.close()
        self._socket.close()
        self._wakeup_reader.close()
        self._wakeup_writer.close()


def watch_startup(start: StartupProgress, stall_timeout: float, rank: int, size: int = 1) -> None:
    """Ends this process with EXIT_STALLED and one line if a stage of its startup takes too long.

    The supervisor prints the line, once for all ranks that hang in the same stage.

    Native code may keep the interpreter lock all the time. Then a thread of faulthandler prints the
    stacks instead, and the exit code is EXIT_FAILURE.

    Args:
      start: Knows the current stage, and when startup is over.
      stall_timeout: --stall_timeout in seconds; 0 means no limit.
      rank: This process's number.
      size: Number of ranks; if there are several, each sends its stages to the supervisor.
    """
    if stall_timeout:
        threading.Thread(
            target=_watch_startup,
            args=(start, stall_timeout, rank, size, _duplicated_stderr()),
            name="start limit",
            daemon=True,
        ).start()


def _duplicated_stderr() -> int:
    """Returns a duplicate of file descriptor 2, which the import of TensorFlow redirects."""
    try:
        return os.dup(2)
    except OSError:
        # The shell has closed it.
        return os.open(os.devnull, os.O_WRONLY)


def _watch_startup(
    start: StartupProgress, stall_timeout: float, rank: int, size: int, stderr: int
) -> None:
    sent_stage = ""
    next_notification = 0.0
    while not start.finished.wait(min(_STARTUP_CHECK_SECONDS, stall_timeout / 10)):
        stage, since = start.stage
        now = time.monotonic()
        if size > 1 and (stage != sent_stage or now > next_notification):
            sent_stage = stage
            next_notification = now + startup_tracker.NOTIFY_INTERVAL_SECONDS
            startup_tracker.notify_stage(rank, size, stage)
        elapsed = now - since
        factor = _SLOW_STAGE_FACTOR if stage in _SLOW_STAGES else _STAGE_FACTOR
        limit = max(_MIN_STAGE_SECONDS, stall_timeout * factor)
        if elapsed > limit:
            frame = next(iter(main_stack()), "unknown")
            message = (
                f"error: rank {rank} on {socket.gethostname()} (process {os.getpid()}) hung for"
                f" {elapsed:.0f} s while {stage or 'starting'}, in {frame}, so the job was stopped"
                f" (--stall_timeout={stall_timeout:g}). Look for a rank, a host or a file system"
                " that does not answer."
            )
            exit_stalled(startup_tracker.hung_line(message, stage, elapsed, stall_timeout))
        # This replaces the timer that the previous cycle has set.
        faulthandler.dump_traceback_later(
            limit - elapsed + _NATIVE_CODE_GRACE_SECONDS, exit=True, file=stderr
        )
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)
    if size > 1:
        startup_tracker.notify_stage(rank, size, None)


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
