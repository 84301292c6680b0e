"""Finds the hosts on which a job can start: those of `-H`, or those that the user's script prints;
and that answer.

Threads of its own run the script, with a time limit, and ask the hosts, so that an answer is there
at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping

from hybrid_imagenet.errors import UserError, printable

_HOST = re.compile(
    r"(?!\d+(:|$))([A-Za-z0-9](?:[A-Za-z0-9._-]{0,250}[A-Za-z0-9])?)(?::([1-9][0-9]{0,3}))?"
)
_MAX_OUTPUT = 1 << 20  # bytes of a script's output
_EVERY = 1.0  # seconds between runs of the script
_LIMIT = 10.0  # seconds for one run
_CONNECT = 3.0  # seconds for a host to answer
_MISSES = 2  # looks in a row at which a host did not answer: it is taken from the list

List = Callable[[], Mapping[str, int]]
"""Gives the slots of each host; raises ValueError where the answer cannot be believed."""


def parse_host(word: str, default_slots: int) -> tuple[str, int]:
    """Returns name and slots of `HOST` or `HOST:SLOTS`.

    Raises:
      ValueError: for anything else, such as what a shell would not take for a name.
    """
    match = _HOST.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word[:60]}' is not HOST or HOST:SLOTS")
    return match[2], int(match[3] or default_slots)


def by_script(script: str, limit: float = _LIMIT) -> List:
    """Returns what lists the hosts that a script prints, `HOST:SLOTS` a line, or `HOST` for one
    rank.

    Args:
      script: a program and its arguments.
      limit: seconds for one run.

    Raises:
      UserError: for words that a shell could not split.
    """
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UserError(f"--host_discovery_script {script}: {error}") from None

    def listed() -> dict[str, int]:
        lines = (line.strip() for line in _output(words, limit).splitlines())
        found = dict(parse_host(line, 1) for line in lines if line)
        if not found:
            raise ValueError("printed no host")
        return found

    return listed


def _output(words: list[str], limit: float) -> str:
    """Returns what one run of the script prints; into a file, as a process that outlives it would
    hold a pipe open.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, IndexError) as error:
            raise ValueError(
                f"cannot be run ({getattr(error, 'strerror', None) or 'no words'})"
            ) from None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise ValueError(f"gave no answer within {limit:g} s") from None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        found = output.read(_MAX_OUTPUT + 1)
    if len(found) > _MAX_OUTPUT:
        raise ValueError(f"printed more than {_MAX_OUTPUT} bytes")
    if code:
        raise ValueError(f"ended with code {code}")
    return found.decode(errors="replace")


class Discovery:
    """Keeps the hosts that are listed and that answer."""

    def __init__(
        self,
        listed: List,
        *,
        answers: Callable[[str], bool],
        every: float = _EVERY,
        ask_first: bool = False,
    ):
        """Lists the hosts once, then in a thread. An answer that cannot be believed changes
        nothing.

        Args:
          listed: gives the slots of each host.
          answers: whether a host can be reached.
          every: seconds between two looks.
          ask_first: leave out hosts that do not answer from the beginning, as a cloud may list them
            before they are up.

        Raises:
          UserError: if there is no list the first time.
        """
        self._list, self._answers, self._every = listed, answers, every
        self._misses: dict[str, int] = {}
        self._stop = threading.Event()
        try:
            self._listed = listed()
        except ValueError as error:
            raise UserError(f"--host_discovery_script: {error}") from None
        self._hosts: Mapping[str, int] = dict(self._listed)
        for _ in range(_MISSES if ask_first else 0):
            self._hosts = self._reachable(self._listed)
        # Apart, so that a script that hangs does not delay the news that a host is lost.
        for work in (self._keep_listing, self._keep_asking):
            threading.Thread(target=work, name="discovery", daemon=True).start()

    def hosts(self) -> dict[str, int]:
        """Returns the slots of each host that answers, as of the last look."""
        return dict(self._hosts)

    def stop(self) -> None:
        """Ends the threads after the run under way."""
        self._stop.set()

    def _keep_listing(self) -> None:
        failing = False
        while not self._stop.wait(self._every):
            try:
                self._listed, failing = self._list(), False
            except ValueError as error:
                if not failing:  # once, also where it is another rubbish each time
                    _tell(f"keeps the hosts known so far: {error}")
                failing = True

    def _keep_asking(self) -> None:
        while not self._stop.wait(self._every):
            self._hosts = self._reachable(self._listed)

    def _reachable(self, listed: Mapping[str, int]) -> dict[str, int]:
        with concurrent.futures.ThreadPoolExecutor(max_workers=64) as pool:
            answers = dict(zip(listed, pool.map(self._answers, listed), strict=True))
        self._misses = {
            host: 0 if answers[host] else self._misses.get(host, 0) + 1 for host in listed
        }
        for host in listed:
            if self._misses[host] == _MISSES:
                _tell(f"omits {host}: it does not answer")
        return {host: slots for host, slots in listed.items() if self._misses[host] < _MISSES}


def _tell(text: str) -> None:
    print(f"host discovery {printable(text)}", file=sys.stderr, flush=True)


def answers_ssh(host: str, port: int | None) -> bool:
    """Returns whether something listens at the address and port at which ssh would look for a
    host.
    """
    try:
        address = _ssh_address(host, port)
    except (OSError, subprocess.TimeoutExpired):
        return True  # not to be known: ssh itself will see
    if address is None:
        return True
    try:
        socket.create_connection(address, timeout=_CONNECT).close()
    except OSError:
        return False
    return True


@functools.cache  # hosts are asked every second, up to hundreds; ssh's configuration stays as it is
def _ssh_address(host: str, port: int | None) -> tuple[str, int] | None:
    """Returns the address and port at which ssh would look for a host; None where it goes by way of
    another.
    """
    asked = subprocess.run(
        ["ssh", *(["-p", str(port)] if port else []), "-G", host],
        capture_output=True,
        text=True,
        timeout=_CONNECT,
    )
    settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    if asked.returncode or {"proxycommand", "proxyjump"} & set(settings):
        return None
    return settings.get("hostname", host), int(settings.get("port", port or 22))
