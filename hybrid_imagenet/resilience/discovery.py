"""Finds the hosts on which a job can start.

These are the hosts of -H, or those that the user's script prints, as far as they answer. Threads
run the script, with a time limit, and connect to the hosts, so that the current list is always
available at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import ipaddress
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
_MAX_OUTPUT_BYTES = 1 << 20
_CHECK_SECONDS = 1.0
_SCRIPT_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
# A host is removed when it has not answered in this many checks in a row.
_MAX_MISSES = 2
_MAX_CONNECTION_THREADS = 64

HostLister = Callable[[], Mapping[str, int]]
"""Returns the slots of each host; raises ValueError if the list is not valid."""


class Discovery:
    """Keeps the list of hosts that are listed and that answer."""

    def __init__(
        self,
        list_hosts: HostLister,
        *,
        answers: Callable[[str], bool],
        check_seconds: float = _CHECK_SECONDS,
        check_first: bool = False,
    ):
        """Lists the hosts once, and then again and again in threads.

        A later list that is not valid changes nothing.

        Args:
          list_hosts: Returns the slots of each host.
          answers: Returns whether a host can be reached.
          check_seconds: Time between two checks.
          check_first: Remove hosts that do not answer before this returns, because a cloud may list
            hosts before they are up.

        Raises:
          UserError: If the first list is not valid.
        """
        self._list_hosts = list_hosts
        self._answers = answers
        self._check_seconds = check_seconds
        self._misses: dict[str, int] = {}
        self._stop = threading.Event()
        try:
            self._listed = list_hosts()
        except ValueError as error:
            raise UserError(
                f"{error}. The script must print HOST:SLOTS, one host per line."
            ) from None
        self._hosts: Mapping[str, int] = dict(self._listed)
        if check_first:
            for _ in range(_MAX_MISSES):
                self._hosts = self._reachable(self._listed)
        # Two threads, so that a script that hangs does not delay the check of the hosts.
        for target in (self._keep_listing, self._keep_checking):
            threading.Thread(target=target, name="discovery", daemon=True).start()

    def hosts(self) -> dict[str, int]:
        """Returns the slots of each host that answered in the last check."""
        return dict(self._hosts)

    def stop(self) -> None:
        """Ends the threads after their current check."""
        self._stop.set()

    def _keep_listing(self) -> None:
        has_failed = False
        while not self._stop.wait(self._check_seconds):
            try:
                self._listed = self._list_hosts()
                has_failed = False
            except ValueError as error:
                # Print the first of several errors in a row, even if each is a different one.
                if not has_failed:
                    _print_error(f"{error}. The earlier hosts are kept.")
                has_failed = True

    def _keep_checking(self) -> None:
        while not self._stop.wait(self._check_seconds):
            self._hosts = self._reachable(self._listed)

    def _reachable(self, listed: Mapping[str, int]) -> dict[str, int]:
        """Returns the hosts of a list that have not missed too many checks, this one included."""
        with concurrent.futures.ThreadPoolExecutor(_MAX_CONNECTION_THREADS) as pool:
            answers = dict(zip(listed, pool.map(self._answers, listed), strict=True))
        misses = {}
        for host in listed:
            misses[host] = 0 if answers[host] else self._misses.get(host, 0) + 1
            if misses[host] == _MAX_MISSES:
                _print_error(f"{host} does not answer. The job continues without it.")
        self._misses = misses
        return {host: slots for host, slots in listed.items() if misses[host] < _MAX_MISSES}


def list_by_script(script: str, limit: float = _SCRIPT_SECONDS) -> HostLister:
    """Returns a function that lists the hosts that a script prints.

    The script prints one host per line, as `HOST:SLOTS`, or as `HOST` for one rank.

    Args:
      script: A program and its arguments.
      limit: Seconds for one run.

    Raises:
      UserError: If a shell could not split the words of `script`.
    """
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UserError(
            f"--host_discovery_script={script} cannot be split into words ({error}). Quote it as in"
            " a shell."
        ) from None

    def list_hosts() -> dict[str, int]:
        try:
            return _parse_hosts(_script_output(words, limit))
        except ValueError as error:
            raise ValueError(f"--host_discovery_script={script} {error}") from None

    return list_hosts


def _parse_hosts(output: str) -> dict[str, int]:
    """Returns the slots of each host in the output of a script.

    Raises:
      ValueError: If a line is not valid, or there is no host; the text continues a sentence about
        the script.
    """
    lines = (line.strip() for line in output.splitlines())
    try:
        hosts = dict(parse_host(line, 1) for line in lines if line)
    except ValueError as error:
        raise ValueError(f"printed a line that is not valid: {error}") from None
    if not hosts:
        raise ValueError("printed no host")
    return hosts


def parse_host(word: str, default_slots: int) -> tuple[str, int]:
    """Returns name and slots of `HOST` or `HOST:SLOTS`.

    Raises:
      ValueError: For anything else. Names are strict, so that no shell can misread them.
    """
    match = _HOST.fullmatch(word)
    if match is None:
        problem = "is not HOST or HOST:SLOTS"
        if _is_ipv6_address(word):
            problem = "is an IPv6 address, which is not supported. Use a name or an IPv4 address"
        raise ValueError(f"'{word[:60]}' {problem}")
    return match[2], int(match[3] or default_slots)


def _is_ipv6_address(word: str) -> bool:
    """Returns whether a word is ADDRESS, [ADDRESS] or [ADDRESS]:SLOTS."""
    bracketed = re.fullmatch(r"\[(.*)\](:\d+)?", word)
    try:
        ipaddress.IPv6Address(bracketed[1] if bracketed else word)
    except ValueError:
        return False
    return True


def _script_output(words: list[str], limit: float) -> str:
    """Runs the script once and returns what it prints.

    Raises:
      ValueError: If it cannot be run, fails, takes too long or prints too much.
    """
    # A file instead of a pipe, because a process that outlives the script would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"cannot be run ({error.strerror or 'no words'})") from None
        except IndexError:
            raise ValueError("cannot be run (no words)") from None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise ValueError(f"gave no answer within {limit:g} s") from None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        printed = output.read(_MAX_OUTPUT_BYTES + 1)
    if len(printed) > _MAX_OUTPUT_BYTES:
        raise ValueError(f"printed more than {_MAX_OUTPUT_BYTES} bytes")
    if code:
        raise ValueError(f"ended with code {code}")
    return printed.decode(errors="replace")


def answers_ssh(host: str, port: int | None) -> bool:
    """Returns whether the address and port that ssh would use for a host accept a connection.

    Also returns True where this cannot be checked, because then ssh itself must find out.
    """
    try:
        address = _ssh_address(host, port)
    except (OSError, subprocess.TimeoutExpired):
        return True
    if address is None:
        return True
    try:
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


# Cached, because up to hundreds of hosts are checked every second, and ssh's configuration does not
# change meanwhile.
@functools.cache
def _ssh_address(host: str, port: int | None) -> tuple[str, int] | None:
    """Returns the address and port that ssh would use, or None if it connects through a proxy."""
    port_option = ["-p", str(port)] if port else []
    configuration = subprocess.run(
        ["ssh", *port_option, "-G", host],
        capture_output=True,
        text=True,
        timeout=_CONNECT_SECONDS,
    )
    lines = configuration.stdout.splitlines()
    settings = dict(line.split(" ", 1) for line in lines if " " in line)
    uses_proxy = "proxycommand" in settings or "proxyjump" in settings
    if configuration.returncode or uses_proxy:
        return None
    return settings.get("hostname", host), int(settings.get("port", port or 22))


def _print_error(text: str) -> None:
    print(f"host discovery: {printable(text)}", file=sys.stderr, flush=True)
