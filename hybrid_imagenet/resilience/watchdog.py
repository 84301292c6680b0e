"""Names and ends ranks that hang: a thread of each rank tells the others that it lives and which
step it is at.

Horovod's own stall inspector needs every rank's background thread to answer; a rank that is
stopped, or whose host is gone, blocks it too. Here each rank sends small datagrams (UDP) to two
listeners, rank 0 and a deputy on another host where there is one, outside of the collectives that
hang. A beat carries the Python stack of the sender's main thread, so that the last one tells what a
rank was doing that cannot be asked any more.

That needs connected ranks; a dead mount or a stopped rank waits before. So a thread of each rank
looks at the stage of its start (`startup.STARTUP_PROGRESS`) until the first training step is done
(`watch_start`), and tells the supervisor (`arrivals`).
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

from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.hosts import interfaces
from hybrid_imagenet.resilience import arrivals
from hybrid_imagenet.resilience.exit_code import end_with_line
from hybrid_imagenet.resilience.heartbeats import MAX_BYTES, Beat, Ledger, main_stack, shown_file
from hybrid_imagenet.startup import StartupProgress

_NAMED_AFTER = (
    30.0  # seconds without a sign of life after which a rank is named, or half of --stall_timeout
)
_LISTENER_GRACE = (
    15.0  # seconds more after which a rank ends by itself: the listeners have not done it
)
_AT_ONCE = 1000  # datagrams between two looks at the clock
_random = random.Random()  # not the generator that the program of a user has seeded
# of the interval, at random: of 4,096 beats at the same moment a socket's queue holds some 300
_SPREAD = 0.2
_LOOK = 0.5
# A stage may last this many times --stall_timeout. The slow ones read every file name of a dataset,
# or compile.
_FACTOR, _SLOW_FACTOR = 2.0, 6.0
_LEAST = 60.0  # seconds that a stage may last in any case: imports take a while on a loaded host
# seconds more for a stage in which no thread of Python runs, as TensorFlow connecting its servers
_NO_THREAD = 15.0
_SLOW = ("reading the dataset", "building the model", "compiling the step")


def listeners(hosts: Sequence[str]) -> tuple[int, ...]:
    """Returns rank 0 and its deputy: the first rank on another host, else rank 1."""
    if len(hosts) == 1:
        return (0,)
    return (0, next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1))


class Watchdog:
    """Exchanges heartbeats with the other ranks from a daemon thread, and names and ends those that
    hang.

    A rank that gives no sign of life is named on standard error after 30 s (or half of
    `stall_timeout`, if that is less) with its host, process, last step and stack; so are the
    culprits when no rank advances. After `stall_timeout` the job ends with EXIT_STALLED. Before the
    first step, which compiles, only silence counts.
    """

    def __init__(
        self,
        ranks: Communicator,
        stall_timeout: float,
        *,
        waits_in: Sequence[ModuleType] = (),
        lasts: Callable[[], bool] = lambda: True,
        option: str = "--stall_timeout",
        remedy: str = "; start again with --resume",
    ):
        """Exchanges addresses; every rank calls it.

        Args:
          ranks: this rank and the others.
          stall_timeout: 0 switches the watchdog off.
          waits_in: modules in which a rank that has done its own part waits for the others: it is
          not to blame.
          lasts: returns whether what is watched still runs; if not, this rank signs off without
          `stop`.
          option: what the user calls `stall_timeout`.
          remedy: what the last line says after "the job ends".
        """
        self._rank, self._hosts = ranks.rank, ranks.hosts
        self._limit = stall_timeout
        self._patience = min(_NAMED_AFTER, stall_timeout / 2)
        self._interval = min(5.0, max(0.2, self._patience / 5))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        self._progress = self._began = time.monotonic()
        self._notes = 0
        self._told: tuple[int, ...] = ()
        self._failed = False
        self._lasts = lasts
        self._option, self._remedy = option, remedy
        if not stall_timeout:
            return
        self._listeners = listeners(ranks.hosts)
        one_host = len(set(ranks.hosts)) == 1
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("127.0.0.1" if one_host else "", 0))
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._token: str = ranks.broadcast_object(secrets.token_hex(16))
        places = ranks.allgather_object(
            [[] if one_host else list(interfaces().values()), self._socket.getsockname()[1]]
        )
        files = [shown_file(module) for module in waits_in]
        self._ledger = Ledger(self._patience, files)
        self._targets = [
            target for rank in self._listeners for target in self._reach(rank, *places[rank])
        ]

    def _reach(self, rank: int, addresses: Sequence[str], port: int) -> list[tuple[str, int]]:
        if rank == self._rank:
            return []
        if self._hosts[rank] == self._hosts[self._rank]:
            addresses = ["127.0.0.1"]
        return [(address, port) for address in addresses]

    def start(self) -> None:
        """Starts the thread."""
        if self._limit:
            self._due = time.monotonic() + _random.uniform(0, self._interval)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def note(self, step: int | None = None) -> None:
        """Notes progress: a training step, or, without a number, something else such as a batch of
        validation.
        """
        now = time.monotonic()
        if self._step is None:
            self._began = now
        else:
            self._notes += 1
        if step is not None:
            self._step = step
        self._progress = now

    def stop(self) -> None:
        """Signs off at the listeners and ends the thread."""
        if self._thread is None:
            return
        self._stop.set()
        with contextlib.suppress(OSError):  # closed: the thread has ended by itself
            self._waker.send(b".")
        self._thread.join()
        self._thread = None

    def _leave(self) -> None:
        self._send(self._beat(leaving=True))
        for part in (self._selector, self._socket, self._wake, self._waker):
            part.close()

    def _watch(self) -> None:
        """Sends beats, listens and judges until `stop`, whatever is received."""
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                if not self._failed:  # once; without its watchdog a rank would soon count as silent
                    self._failed = True
                    print(
                        f"watchdog: continues after an error\n{traceback.format_exc()}",
                        file=sys.stderr,
                        flush=True,
                    )
                self._stop.wait(self._interval)
        self._leave()

    def _turn(self) -> None:
        """Listens until the next beat is due, sends it and judges."""
        self._receive(self._due)
        if not self._lasts():
            self._stop.set()
        if self._stop.is_set():
            return
        now = time.monotonic()
        # A delay of this process itself, stopped or starved of its processor, must not be blamed on
        # others.
        late = max(0.0, now - self._due)
        self._due = now + self._interval * _random.uniform(1 - _SPREAD, 1 + _SPREAD)
        self._ledger.forgive(late)
        self._progress += late
        beat = self._beat()
        self._send(beat)
        self._ledger.heard(beat, now)
        self._drain()
        if self._rank in self._listeners:
            self._judge(now)
        if beat.step is not None and beat.idle > self._limit + _LISTENER_GRACE:
            self._end(f"rank {self._rank} on {beat.host} made no progress for {beat.idle:.0f} s")

    def _beat(self, leaving: bool = False) -> Beat:
        started = self._step is not None
        idle = time.monotonic() - self._progress if started else 0.0
        return Beat(
            rank=self._rank,
            host=self._hosts[self._rank],
            process=os.getpid(),
            step=self._step,
            idle=max(0.0, idle),
            mean=max(0.0, self._progress - self._began) / max(self._notes, 1),
            stack=main_stack(),
            leaving=leaving,
        )

    def _send(self, beat: Beat) -> None:
        data = beat.encode(self._token)
        for target in self._targets:
            with contextlib.suppress(
                OSError
            ):  # no way to this address of the rank, or its queue is full
                self._socket.sendto(data, target)

    def _receive(self, until: float) -> None:
        """Takes datagrams as they come, so that a flood of strange ones leaves room in the queue
        for beats.
        """
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            self._selector.select(left)
            self._drain()

    def _drain(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data = self._socket.recv(MAX_BYTES + 1)
            except OSError:  # nothing more; or a target that refused an earlier datagram
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        beat = Beat.decode(data, self._token, len(self._hosts))
        if beat is not None:
            self._ledger.heard(beat, time.monotonic())

    def _judge(self, now: float) -> None:
        """Names who hangs, once; the deputy speaks only when rank 0 is silent."""
        if self._rank and self._ledger.silence(0, now) <= self._patience:
            return
        stall = self._ledger.stall(now)
        if stall is None:
            self._told = ()
            return
        own = f"rank {self._rank} on {self._hosts[self._rank]}"
        # A deputy that hears nobody and is read by the user has lost its own network for a while.
        alone = self._rank != 0 and len(stall.ranks) == len(self._hosts) - 1 > 1
        if stall.ranks != self._told:
            self._told = stall.ranks
            print(
                f"stall: {own} hears no other rank" if alone else stall.text,
                file=sys.stderr,
                flush=True,
            )
        if stall.seconds > self._limit and alone:
            self._end(f"{own} heard no other rank for {stall.seconds:.0f} s")
        if stall.seconds > self._limit:
            ranks = ", ".join(f"{rank} on {self._hosts[rank]}" for rank in stall.ranks)
            self._end(f"rank {ranks} hung for {stall.seconds:.0f} s")

    def _end(self, what: str) -> None:
        end_with_line(f"error: {what} ({self._option}={self._limit:g}): the job ends{self._remedy}")


def watch_start(start: StartupProgress, stall_timeout: float, rank: int, size: int = 1) -> None:
    """Ends this process with EXIT_STALLED and one line if a stage of its start takes too long.

    Native code may keep the interpreter's lock all the while. Then faulthandler's own thread prints
    the stacks, and the exit code is EXIT_FAILURE.

    Args:
      start: tells the stage, and when the start is over.
      stall_timeout: --stall_timeout, in seconds; 0 watches nothing.
      rank, size: this process's number and how many there are; several tell their supervisor of
        each stage.
    """
    if stall_timeout:
        arguments = start, stall_timeout, rank, size
        threading.Thread(
            target=_watch_start, args=arguments, name="start limit", daemon=True
        ).start()


def _watch_start(start: StartupProgress, stall_timeout: float, rank: int, size: int) -> None:
    told, due = "", 0.0
    while not start.finished.wait(min(_LOOK, stall_timeout / 10)):
        stage, since = start.stage
        now = time.monotonic()
        if size > 1 and (stage != told or now > due):
            told, due = stage, now + arrivals.EVERY
            arrivals.announce(rank, size, stage)
        seconds = now - since
        limit = max(_LEAST, stall_timeout * (_SLOW_FACTOR if stage in _SLOW else _FACTOR))
        faulthandler.dump_traceback_later(limit - seconds + _NO_THREAD, exit=True, file=2)
        if seconds > limit:
            where = next(iter(main_stack()), "unknown")
            end_with_line(
                f"error: rank {rank} on {socket.gethostname()} (process {os.getpid()}) hung for"
                f" {seconds:.0f} s while {stage or 'starting'} (--stall_timeout={stall_timeout:g}),"
                f" in {where}: the job ends; look for a rank, a host or a file system that does not"
                " answer"
            )
    faulthandler.cancel_dump_traceback_later()
    if size > 1:
        arrivals.announce(rank, size, None)
