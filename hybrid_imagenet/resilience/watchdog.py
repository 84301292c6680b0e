"""Leaves no rank hanging or behind: a thread of each rank tells the others that it lives and where it is.

Horovod's own stall inspector needs every rank's background thread to answer; a rank that is stopped, or whose host is
gone, blocks it too. Here each rank sends small datagrams (UDP) to two listeners, rank 0 and a deputy on another host
where there is one, outside of the collectives that hang. A beat carries the Python stack of the sender's main thread,
so that the last one tells what a rank was doing that cannot be asked any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_STALLED
from hybrid_imagenet.resilience.heartbeats import (
    Beat,
    Ledger,
    decode_verdict,
    encode_verdict,
    main_stack,
    own_addresses,
    shown_file,
)

_NAMED_AFTER = 30.0  # seconds without a sign of life after which a rank is named, or half of --stall_seconds
_LAUNCHER_GRACE = 8.0  # seconds for saving after the launcher is gone
_LISTENER_GRACE = 15.0  # seconds more after which a rank ends by itself: the listeners have not done it
_ELASTIC_GRACE = 180.0  # the same for elastic ranks, which wait for a time-out of Gloo when a host is gone
_MAX_DATAGRAM = 1 << 16
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK")


class Ranks(Protocol):
    """What the watchdog needs of a communicator."""

    rank: int
    size: int
    hosts: tuple[str, ...]

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """What rank `root` passed."""

    def allgather_object(self, obj: Any) -> list[Any]:
        """What each rank passed."""


def listeners(hosts: Sequence[str]) -> tuple[int, ...]:
    """Rank 0 and its deputy: the first rank on another host, else rank 1."""
    if len(hosts) == 1:
        return (0,)
    return (0, next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1))


class SignsOfLife(Protocol):
    """What the watchdog needs of a guardian."""

    def alive(self) -> None:
        """This process runs."""

    def rest(self) -> None:
        """It is not watched for now."""


class Watchdog:
    """Watches over the ranks of a run from a daemon thread of each of them.

    A rank that gives no sign of life is named on standard error after 30 s (or half of `stall_seconds`, if that is
    less) with its host, process, last step and stack; so are the culprits when no rank advances. After
    `stall_seconds` the job ends with EXIT_STALLED; of elastic ranks the culprits alone do. Before the first step, which
    compiles, only silence counts.
    """

    def __init__(
        self,
        ranks: Ranks,
        stall_seconds: float,
        *,
        waits_in: Sequence[ModuleType] = (),
        elastic: bool = False,
        guardian: SignsOfLife | None = None,
    ):
        """Exchanges addresses; every rank calls it.

        Args:
          ranks: this rank and the others.
          stall_seconds: 0 switches the watchdog off.
          waits_in: modules in which a rank that has done its own part waits for the others: it is not to blame.
          elastic: the others go on without a rank that hangs.
          guardian: is told that this process lives, from `start` to `stop`.
        """
        self._rank, self._hosts = ranks.rank, ranks.hosts
        self._limit = stall_seconds
        self._patience = min(_NAMED_AFTER, stall_seconds / 2)
        self._interval = min(5.0, max(0.2, self._patience / 5))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._step: int | None = None
        self._progress = self._began = time.monotonic()
        self._notes = 0
        self._told: tuple[int, ...] = ()
        self._elastic, self._guardian = elastic, guardian
        if not stall_seconds:
            return
        self._ledger = Ledger(self._patience, [shown_file(module) for module in waits_in])
        self._listeners = listeners(ranks.hosts)
        one_host = len(set(ranks.hosts)) == 1
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("127.0.0.1" if one_host else "", 0))
        self._token: str = ranks.broadcast_object(secrets.token_hex(16))
        places = ranks.allgather_object([[] if one_host else own_addresses(), self._socket.getsockname()[1]])
        self._targets = [target for rank in self._listeners for target in self._reach(rank, *places[rank])]
        self._everyone = [target for rank, place in enumerate(places) for target in self._reach(rank, *place)]

    def _reach(self, rank: int, addresses: Sequence[str], port: int) -> list[tuple[str, int]]:
        if rank == self._rank:
            return []
        if self._hosts[rank] == self._hosts[self._rank]:
            addresses = ["127.0.0.1"]
        return [(address, port) for address in addresses]

    def start(self) -> None:
        """Starts the thread."""
        if self._limit:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def note(self, step: int | None = None) -> None:
        """Progress: a training step is done, or, without a number, something else such as a batch of validation."""
        now = time.monotonic()
        if self._step is None:
            self._began = now
        else:
            self._notes += 1
        if step is not None:
            self._step = step
        self._progress = now

    def stop(self) -> None:
        """Takes leave of the listeners and ends the thread."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if self._guardian is not None:
            self._guardian.rest()
        self._send(self._beat(leaving=True))
        self._socket.close()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._interval):
            now = time.monotonic()
            # What this process was late itself, stopped or starved of its processor, it cannot hold against others.
            late = max(0.0, now - last - self._interval)
            self._ledger.forgive(late)
            self._progress += late
            last = now
            if self._guardian is not None:
                self._guardian.alive()
            beat = self._beat()
            self._send(beat)
            self._ledger.heard(beat, now)
            self._receive(now)
            if self._rank in self._listeners:
                self._judge(now)
            grace = _ELASTIC_GRACE if self._elastic else _LISTENER_GRACE
            if beat.step is not None and beat.idle > self._limit + grace:
                self._end(f"rank {self._rank} on {beat.host} made no progress for {beat.idle:.0f} s")

    def _beat(self, leaving: bool = False) -> Beat:
        started = self._step is not None
        return Beat(
            rank=self._rank,
            host=self._hosts[self._rank],
            process=os.getpid(),
            step=self._step,
            idle=time.monotonic() - self._progress if started else 0.0,
            mean=(self._progress - self._began) / max(self._notes, 1),
            stack=main_stack(),
            leaving=leaving,
        )

    def _send(self, beat: Beat) -> None:
        self._send_to(self._targets, beat.encode(self._token))

    def _send_to(self, targets: Sequence[tuple[str, int]], data: bytes) -> None:
        for target in targets:
            with contextlib.suppress(OSError):  # no way to this address of the rank, or its queue is full
                self._socket.sendto(data, target)

    def _receive(self, now: float) -> None:
        while True:
            try:
                data = self._socket.recv(_MAX_DATAGRAM)
            except OSError:  # nothing more; or a target that refused an earlier datagram
                return
            if self._elastic and self._rank in decode_verdict(data, self._token):
                self._end(f"rank {self._rank} on {self._hosts[self._rank]} hung")
            beat = Beat.decode(data, self._token)
            if beat is not None and 0 <= beat.rank < len(self._hosts):
                self._ledger.heard(beat, now)

    def _judge(self, now: float) -> None:
        """Names who hangs, once; the deputy speaks only when rank 0 is silent."""
        stall = self._ledger.stall(now)
        if stall is None:
            self._told = ()
            return
        if self._rank and self._ledger.silence(0, now) <= self._patience:
            return
        if stall.ranks != self._told:
            self._told = stall.ranks
            print(stall.text, file=sys.stderr, flush=True)
        if stall.seconds > self._limit and self._elastic and self._rank not in stall.ranks:
            self._send_to(self._everyone, encode_verdict(stall.ranks, self._token))
        elif stall.seconds > self._limit:
            ranks = ", ".join(f"{rank} on {self._hosts[rank]}" for rank in stall.ranks)
            self._end(f"rank {ranks} hung for {stall.seconds:.0f} s")

    def _end(self, what: str) -> None:
        follows = "the others go on without it" if self._elastic else "the job ends; start it again with --resume"
        print(
            f"error: {what} (--stall_seconds={self._limit:g}): {follows}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STALLED)


def follow_launcher(environ: Mapping[str, str] | None = None) -> None:
    """Ends this rank when its launcher has died, from a daemon thread: first by SIGTERM, so that it saves if it can.

    Does nothing in a process that no launcher started: that may outlive the shell that started it.
    """
    env = os.environ if environ is None else environ
    if not any(name in env for name in LAUNCHER_VARIABLES):
        return
    launchers = _launchers()

    def follow() -> None:
        while all(_parent(process) == parent for process, parent in launchers):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAUNCHER_GRACE)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _launchers() -> list[tuple[int, int]]:
    """Processes and their parents that must stay so: this one, and mpirun where horovodrun's shell waits for it.

    The parent of an mpirun that a user started may go: with nohup it outlives the login.
    """
    own, parent = os.getpid(), os.getppid()
    try:
        above = _parent(parent)
        words = Path(f"/proc/{above}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no /proc, or gone already
        return [(own, parent)]
    if len(words) > 2 and words[1] == b"-c" and words[2].lstrip().startswith(b"mpirun "):
        return [(own, parent), (parent, above)]
    return [(own, parent)]


def _parent(process: int) -> int:
    """The number of a process's parent; 0 if there is no such process."""
    if process == os.getpid():
        return os.getppid()
    try:
        # The second field, the command, is in parentheses and may hold spaces.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
