"""Finds the hosts of an elastic job: those that the user's script prints and that answer.

Horovod asks for them once a second while it holds a lock that recovery and shutdown need, so the answer must be there
at once: threads of its own run the script, with a time limit, and look which hosts answer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from hybrid_imagenet.errors import UserError, without_secrets

_HOST = re.compile(r"(?!\d+(:|$))([A-Za-z0-9](?:[A-Za-z0-9._-]{0,250}[A-Za-z0-9])?)(?::([1-9][0-9]{0,3}))?")
_MAX_OUTPUT = 1 << 20  # bytes of a script's output
_EVERY = 1.0  # seconds between runs of the script
_LIMIT = 10.0  # seconds for one run
_CONNECT = 3.0  # seconds for a host to answer
_MISSES = 2  # looks in a row at which a host did not answer: it is taken from the list


def parse_host(word: str, default_slots: int) -> tuple[str, int]:
    """Returns name and slots of `HOST` or `HOST:SLOTS`.

    Raises:
      ValueError: for anything else, such as what a shell would not take for a name.
    """
    match = _HOST.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word[:60]}' is not HOST or HOST:SLOTS")
    return match[2], int(match[3] or default_slots)


class Discovery:
    """Keeps the hosts that a script lists and that answer, in the form that Horovod's launcher asks for them."""

    def __init__(
        self,
        script: str,
        default_slots: int = 1,
        *,
        answers: Callable[[str], bool] | None = None,
        every: float = _EVERY,
        limit: float = _LIMIT,
    ):
        """Runs the script once, then goes on in a thread. An answer with a line that is no host changes nothing.

        Args:
          script: a program and its arguments; it prints `HOST` or `HOST:SLOTS` a line.
          default_slots: ranks on a host without `:SLOTS`.
          answers: whether a host can be reached; every host if None.
          every: seconds between two runs.
          limit: seconds for one run.

        Raises:
          UserError: if the script gives no hosts the first time.
        """
        self._words, self._default_slots = shlex.split(script), default_slots
        self._answers = answers or (lambda host: True)
        self._every, self._limit = every, limit
        self._told: set[str] = set()
        self._misses: dict[str, int] = {}
        self._stop = threading.Event()
        try:
            self._listed = self._list()
        except ValueError as error:
            raise UserError(f"--host-discovery-script {script}: {error}") from None
        self._hosts: Mapping[str, int] = dict(self._listed)
        # Apart, so that a script that hangs does not delay the news that a host is lost.
        for work in (self._go_on_listing, self._go_on_looking):
            threading.Thread(target=work, name="discovery", daemon=True).start()

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the slots of each host, as of the last look."""
        return dict(self._hosts)

    def stop(self) -> None:
        """Ends the threads after the run under way."""
        self._stop.set()

    def _go_on_listing(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._listed = self._list()
                for kind in tuple(self._told):
                    if kind.startswith("keeps"):
                        self._told.discard(kind)
            except ValueError as error:
                self._tell(f"keeps the hosts known so far: {error}")

    def _go_on_looking(self) -> None:
        while not self._stop.wait(self._every):
            self._hosts = self._reachable(self._listed)

    def _list(self) -> dict[str, int]:
        """Returns the hosts that one run of the script prints; ValueError says why its answer cannot be believed."""
        lines = (line.strip() for line in self._run().splitlines())
        return dict(parse_host(line, self._default_slots) for line in lines if line)

    def _run(self) -> str:
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"cannot be run ({error.strerror})") from None
        late = threading.Event()

        def expire() -> None:
            late.set()
            _kill_session(process.pid)

        timer = threading.Timer(self._limit, expire)
        timer.start()
        try:
            assert process.stdout is not None
            output = process.stdout.read(_MAX_OUTPUT + 1)
            if len(output) > _MAX_OUTPUT:
                raise ValueError(f"printed more than {_MAX_OUTPUT} bytes")
            code = process.wait()
        finally:
            timer.cancel()
            _kill_session(process.pid)
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        if late.is_set():
            raise ValueError(f"gave no answer within {self._limit:g} s")
        if code:
            raise ValueError(f"ended with code {code}")
        return output.decode(errors="replace")

    def _reachable(self, listed: Mapping[str, int]) -> dict[str, int]:
        with concurrent.futures.ThreadPoolExecutor(max_workers=64) as pool:
            answers = dict(zip(listed, pool.map(self._answers, listed), strict=True))
        self._misses = {host: 0 if answers[host] else self._misses.get(host, 0) + 1 for host in listed}
        for host in listed:
            if self._misses[host] == _MISSES:
                self._tell(f"leaves out {host}: it does not answer")
            elif not self._misses[host]:
                self._told.discard(f"leaves out {host}: it does not answer")
        return {host: slots for host, slots in listed.items() if self._misses[host] < _MISSES}

    def _tell(self, text: str) -> None:
        """Prints a line, once until it is no longer so; also if the word that it quotes is another each time."""
        kind = re.sub("'.*'", "", text, flags=re.DOTALL)
        if kind not in self._told and len(self._told) < 1000:
            self._told.add(kind)
            shown = "".join(c if c.isprintable() else "?" for c in without_secrets(text))
            print(f"host discovery {shown}", file=sys.stderr, flush=True)


def answers_ssh(host: str, port: int | None) -> bool:
    """Returns whether something listens at the address and port at which ssh would look for a host."""
    try:
        asked = subprocess.run(
            ["ssh", *(["-p", str(port)] if port else []), "-G", host], capture_output=True, text=True, timeout=_CONNECT
        )
    except (OSError, subprocess.TimeoutExpired):
        return True  # not to be known: Horovod will see
    settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    if asked.returncode or {"proxycommand", "proxyjump"} & set(settings):
        return True
    try:
        address = settings.get("hostname", host), int(settings.get("port", port or 22))
        socket.create_connection(address, timeout=_CONNECT).close()
    except OSError:
        return False
    return True


def _kill_session(process: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process, signal.SIGKILL)
