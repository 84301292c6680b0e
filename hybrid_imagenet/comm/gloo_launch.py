"""Starts ranks that connect through Gloo, elastic or not (`python -m hybrid_imagenet.comm.gloo_launch JSON COMMAND`).

Horovod's launcher gives out the numbers; what runs the command on a host is written here, as `horovodrun` hides the
ranks' exit codes, kills ranks that would save, waits for ever for a host that is lost, and hands names to a shell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hybrid_imagenet.comm.discovery import Discovery, answers_ssh
from hybrid_imagenet.errors import (
    EXIT_NUMERICS,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
    UserError,
)

_END_SECONDS = 3.0  # for a rank to end when it is told to
_TERM_SECONDS = 2.0  # and for its program, or ssh, after SIGTERM
_RECENT = 60.0  # seconds before the end of an elastic job in which a rank's end counts for the job's
_SSH_FAILED = 255
_BY_SIGNAL = 128  # and the signal's number: the exit code of a process that was killed
_SSH = ("-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=10")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The job to start; given as JSON.

    Attributes:
      ranks: their number; of an elastic job, at its start.
      hosts: HOST:SLOTS,... of a job that is not elastic.
      interface: network interface; chosen by the way to the first other host if empty.
      ssh_port: port of sshd; None leaves it to ssh's configuration.
      ssh_options: further options of ssh.
      script: prints the hosts of an elastic job; empty for one that is not.
      slots: ranks on a host for which the script gives no number.
      least: ranks without which an elastic job does not go on.
      most: ranks that an elastic job does not exceed.
      wait: seconds for which an elastic job waits for `least` ranks.
      cooldown: after a failure a host is left out for a time that grows from the first to the second, in seconds.
      orders: name of the environment variable that tells ranks to take orders from standard input.
    """

    ranks: int
    hosts: str = ""
    interface: str = ""
    ssh_port: int | None = None
    ssh_options: tuple[str, ...] = ()
    script: str = ""
    slots: int = 1
    least: int = 1
    most: int = 1
    wait: int = 600
    cooldown: tuple[int, int] = (10, 3600)
    orders: str = ""


class Ranks:
    """Runs commands on hosts, as Horovod's launcher asks for; keeps their exit codes."""

    def __init__(self, plan: Plan):
        """Takes the plan; nothing runs yet."""
        self._plan = plan
        self._running: set[subprocess.Popen[bytes]] = set()
        self._one_failed = threading.Event()
        self.ends: list[tuple[float, int]] = []
        self.lost: list[str] = []

    def execute(self, command: str, slot: Any, events: Sequence[threading.Event] | None) -> tuple[int, float]:
        """Runs a rank's command to its end, or until one of the events; returns its exit code and the time."""
        ends = [*(events or ()), *([] if self._plan.script else [self._one_failed])]
        process = subprocess.Popen(self._command(command, slot.hostname), stdin=subprocess.PIPE, start_new_session=True)
        self._running.add(process)
        while process.poll() is None and not any(event.is_set() for event in ends):
            time.sleep(0.1)
        ours = process.poll() is None
        code = _end(process)
        self._running.discard(process)
        if not ours:
            if code == _SSH_FAILED and not is_local(slot.hostname):
                self.lost.append(slot.hostname)
                print(f"error: the connection to {slot.hostname} is lost", file=sys.stderr, flush=True)
                code = EXIT_STALLED
            elif code > _BY_SIGNAL and not self._plan.script:
                said = f"process rank {slot.rank} on node {slot.hostname} exited on signal {code - _BY_SIGNAL}"
                print(said, file=sys.stderr, flush=True)  # which the supervisor reads
            self.ends.append((time.monotonic(), code))
            if code:
                self._one_failed.set()
        return code, time.time()

    def order(self, number: int, frame: FrameType | None) -> None:
        """Tells all ranks to stop."""
        for process in list(self._running):
            _write(process, b"stop\n")

    def _command(self, command: str, host: str) -> list[str]:
        variables = f"{self._plan.orders}=stdin" if self._plan.orders else ""
        there = f"cd {shlex.quote(str(Path.cwd()))} &&"
        if is_local(host):
            return ["/bin/sh", "-c", f"{there} exec env {variables} {command}"]
        # A shell waits for the rank: ssh has the same code, 255, for a rank that is killed and for a host that is lost.
        # It comes after the variables, so that they do not stand in its command line for all to see.
        words = shlex.split(f"{variables} {command}")
        first = next((number for number, word in enumerate(words) if "=" not in word and word != "env"), len(words))
        waits = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
        shell = f"{there} exec env {shlex.join([*words[:first], *waits, *words[first:]])}"
        port = ["-p", str(self._plan.ssh_port)] if self._plan.ssh_port else []
        return ["ssh", *_SSH, *self._plan.ssh_options, *port, host, shell]


def _end(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit code of a process that has ended, after asking it to end and, if it does not, killing it.

    A rank on another host ends with the order; killing ssh alone would leave it there until it notices.
    """
    if process.poll() is None:
        _write(process, b"end\n")
        for wait, number in ((_END_SECONDS, signal.SIGTERM), (_TERM_SECONDS, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
                break
            _signal(process, number)
    _signal(process, signal.SIGKILL)  # whatever it has left behind
    code = process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()  # type: ignore[union-attr]
    return code if code >= 0 else 128 - code


def _write(process: subprocess.Popen[bytes], order: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended
        process.stdin.write(order)  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)


def is_local(host: str) -> bool:
    """Returns whether a host is this one."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return address.startswith("127.") or address in _addresses()


def _addresses() -> dict[str, str]:
    """Returns the interface of each IPv4 address of this host."""
    found = psutil.net_if_addrs().items()
    return {a.address: name for name, addresses in found for a in addresses if a.family == socket.AF_INET}


def interface_to(hosts: Sequence[str]) -> str:
    """Returns the interface on the way to the first host that is not this one; the loopback if there is none.

    Raises:
      UserError: if a name is unknown or a host cannot be reached.
    """
    for host in hosts:
        if is_local(host):
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
                return _addresses()[probe.getsockname()[0]]
        except (OSError, KeyError) as error:
            reason = getattr(error, "strerror", None) or f"no interface leads to {error}"
            raise UserError(f"host {host}: {reason}: check -H, or give --network_interfaces") from None
    return "lo"


def start(plan: Plan, command: Sequence[str]) -> int:
    """Starts the ranks and waits for their end; returns the job's exit code.

    Raises:
      UserError: if there are no hosts to start with, or one cannot be reached.
    """
    ranks = Ranks(plan)
    signal.signal(signal.SIGUSR1, ranks.order)
    began = time.monotonic()
    try:
        (_start_elastic if plan.script else _start_fixed)(plan, ranks, command)
        return EXIT_OK
    except UserError:
        raise
    except Exception as error:  # Horovod's own report of ranks that ended, and of waiting in vain
        if "imed out waiting" in str(error) or not ranks.ends:
            print(f"error: {_first_line(error)} ({time.monotonic() - began:.0f} s after the start)", file=sys.stderr)
        return _code(ranks.ends)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _code(ends: Sequence[tuple[float, int]]) -> int:
    """Returns the job's exit code from its ranks': the first that means something to the user."""
    now = time.monotonic()
    codes = [code for at, code in ends if code and now - at < _RECENT]
    for good in ((EXIT_USAGE, EXIT_NUMERICS, EXIT_STALLED), (EXIT_PREEMPTED,)):
        if found := [code for code in codes if code in good]:
            return found[0]
    return codes[0] if codes else EXIT_STALLED


def _start_fixed(plan: Plan, ranks: Ranks, command: Sequence[str]) -> None:
    from horovod.runner.common.util.settings import Settings
    from horovod.runner.gloo_run import launch_gloo
    from horovod.runner.util.network import get_driver_ip

    interface = plan.interface or interface_to([word.partition(":")[0] for word in plan.hosts.split(",")])
    settings = Settings(hosts=plan.hosts, num_proc=plan.ranks, nics={interface}, verbose=0)
    launch_gloo(list(command), ranks.execute, settings, [interface], dict(os.environ), get_driver_ip([interface]))


def _start_elastic(plan: Plan, ranks: Ranks, command: Sequence[str]) -> None:
    from horovod.runner.elastic.settings import ElasticSettings
    from horovod.runner.gloo_run import launch_gloo_elastic
    from horovod.runner.http.http_server import RendezvousServer

    def answers(host: str) -> bool:
        return is_local(host) or answers_ssh(host, plan.ssh_port)

    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # a lost rank is no error here
    hosts = Discovery(plan.script, plan.slots, answers=answers)
    settings = ElasticSettings(
        discovery=hosts,
        min_num_proc=plan.least,
        max_num_proc=plan.most,
        elastic_timeout=plan.wait,
        reset_limit=None,
        cooldown_range=list(plan.cooldown),
        num_proc=plan.ranks,
        verbose=0,
    )
    interface = plan.interface or interface_to(list(hosts.find_available_hosts_and_slots()))
    launch_gloo_elastic(
        list(command), ranks.execute, settings, dict(os.environ), lambda driver: [interface], RendezvousServer(0), None
    )


def main(arguments: Sequence[str]) -> int:
    """Starts what the plan in the first argument says."""
    # Horovod's view of what is reported here, and its server's of ranks that are gone before it has answered them.
    logging.getLogger().addHandler(logging.NullHandler())
    socketserver.TCPServer.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    values = json.loads(arguments[0])
    for name in ("ssh_options", "cooldown"):
        values[name] = tuple(values[name])
    try:
        return start(Plan(**values), arguments[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of Horovod's launcher may still wait for a host
