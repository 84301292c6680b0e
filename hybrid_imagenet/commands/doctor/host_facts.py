"""Asks hosts for their facts: over ssh, or directly on this one."""

from __future__ import annotations

import concurrent.futures
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience.discovery import parse_host

CONNECT_SECONDS = 10
ANSWER_SECONDS = 60
_MAX_SIMULTANEOUS_HOSTS = 64
# ssh ends with this code if the connection fails; other codes are the remote command's.
_SSH_FAILED = 255
_COMMAND_NOT_FOUND = 127


class UnreachableError(Exception):
    """A host did not return its facts; the message says why.

    Attributes:
      remedy: What the user can do.
    """

    def __init__(self, message: str, remedy: str):
        super().__init__(message)
        self.remedy = remedy


def parse_hosts(text: str, default_slots: int = 1) -> dict[str, int]:
    """Parses `HOST[:SLOTS],...`; returns the slots of each host, in the order of the list.

    Args:
      text: The value of `-H`.
      default_slots: Slots of a host without `:SLOTS`.

    Raises:
      UserError: For an empty list, an invalid name, or one that is listed twice.
    """
    if not text.strip():
        # A script may pass a variable that is not set.
        raise UserError("-H has no value. Write -H HOST:SLOTS,..., or omit -H.")
    slots: dict[str, int] = {}
    for word in text.split(","):
        try:
            name, count = parse_host(word.strip(), default_slots)
        except ValueError as error:
            raise UserError(f"-H {text} is not valid: {error}. Write HOST:SLOTS,...") from None
        if name in slots:
            raise UserError(
                f"-H {text} lists {name} twice. List it once, with all its slots: {name}:N"
            )
        slots[name] = count
    return slots


def query_hosts(
    names: Sequence[str], request: dict[str, Any], ssh_port: int | None
) -> dict[str, Any]:
    """Returns the facts of each host, or its UnreachableError. All hosts are queried at once."""

    def query(name: str) -> Any:
        try:
            return query_host(name, request, ssh_port)
        except UnreachableError as error:
            return error

    workers = min(_MAX_SIMULTANEOUS_HOSTS, len(names))
    with concurrent.futures.ThreadPoolExecutor(max_workers=workers) as pool:
        return dict(zip(names, pool.map(query, names), strict=True))


def query_host(name: str, request: dict[str, Any], ssh_port: int | None = None) -> dict[str, Any]:
    """Returns the facts of one host.

    Args:
      name: Name of the host.
      request: The argument of `probe.collect_facts`.
      ssh_port: Port of sshd on the host; None for the port in the configuration of ssh.

    Raises:
      UnreachableError: If it does not answer, or has no environment at the path of this one.
    """
    command = [sys.executable, "-", json.dumps(request)]
    if not is_local(name):
        port = ["-p", str(ssh_port)] if ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        command = ["ssh", *options, *port, name, shlex.join(command)]
    source = (Path(__file__).parent / "probe.py").read_text(encoding="utf-8")
    try:
        completed = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"no answer within {ANSWER_SECONDS} s", "check its load and its file systems"
        ) from None
    except FileNotFoundError:
        raise UnreachableError("this host has no ssh", "install openssh-client") from None
    if completed.returncode != 0:
        raise _unreachable_error(completed)
    try:
        # A login script may print lines before the facts.
        facts: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise UnreachableError(
            "its answer is not JSON", "a login script there prints something: silence it"
        ) from None
    return facts


def _unreachable_error(completed: subprocess.CompletedProcess[str]) -> UnreachableError:
    lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit code {completed.returncode}"
    if completed.returncode == _SSH_FAILED:
        return UnreachableError(
            f"ssh failed: {reason}",
            "make ssh to this host work without a password (ssh-copy-id); check its name and sshd",
        )
    if completed.returncode == _COMMAND_NOT_FOUND:
        return UnreachableError(
            f"{sys.executable} does not exist there",
            "run launch/setup.sh at the same path there, or share the directory",
        )
    return UnreachableError(f"the probe failed: {reason}", "run it by hand there")


def is_local(name: str) -> bool:
    """Returns whether `name` means this host, so that no ssh is needed."""
    return name == "localhost" or name.startswith("127.") or name == socket.gethostname()
