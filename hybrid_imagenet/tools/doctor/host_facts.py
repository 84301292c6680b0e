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


class UnreachableError(Exception):
    """A host that gives no facts; the message says why, and `remedy` what to do."""

    def __init__(self, message: str, remedy: str):
        super().__init__(message)
        self.remedy = remedy


def parse(text: str, default_slots: int = 1) -> dict[str, int]:
    """The slots of each host in `HOST[:SLOTS],...`, in order.

    Raises:
      UserError: for an invalid name, or one that is listed twice.
    """
    slots: dict[str, int] = {}
    for word in text.split(","):
        try:
            name, count = parse_host(word.strip(), default_slots)
        except ValueError as error:
            raise UserError(f"-H {text}: {error}") from None
        if name in slots:
            raise UserError(f"-H {text}: {name} is listed twice; write its slots as {name}:N")
        slots[name] = count
    return slots


def ask_all(names: Sequence[str], request: dict[str, Any], ssh_port: int | None) -> dict[str, Any]:
    """Facts by host, or the UnreachableError of those that gave none. All are asked at once."""

    def ask(name: str) -> Any:
        try:
            return ask_host(name, request, ssh_port)
        except UnreachableError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(max_workers=min(64, len(names))) as pool:
        return dict(zip(names, pool.map(ask, names), strict=True))


def ask_host(name: str, request: dict[str, Any], ssh_port: int | None = None) -> dict[str, Any]:
    """The facts of one host.

    Raises:
      UnreachableError: if it does not answer, or has no environment at the path of this one.
    """
    command = [sys.executable, "-", json.dumps(request)]
    if not is_local(name):
        port = ["-p", str(ssh_port)] if ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        command = ["ssh", *options, *port, name, shlex.join(command)]
    source = (Path(__file__).parent / "probe.py").read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"no answer within {ANSWER_SECONDS} s", "look at its load and its file systems"
        ) from None
    except FileNotFoundError:
        raise UnreachableError("this host has no ssh", "install openssh-client") from None
    if done.returncode != 0:
        raise _explain(done)
    try:
        facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise UnreachableError(
            "its answer cannot be read", "a login script prints something: silence it"
        ) from None
    return facts


def _explain(done: subprocess.CompletedProcess[str]) -> UnreachableError:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit code {done.returncode}"
    if done.returncode == 255:  # ssh's own
        return UnreachableError(
            f"ssh failed: {reason}", "a login without a password must work: ssh-copy-id, name, sshd"
        )
    if done.returncode == 127:
        return UnreachableError(
            f"no {sys.executable} there", "run launch/setup.sh at the same path, or share it"
        )
    return UnreachableError(f"the probe failed: {reason}", "run it by hand there")


def is_local(name: str) -> bool:
    """Whether `name` means this host, so that no ssh is needed."""
    return name == "localhost" or name.startswith("127.") or name == socket.gethostname()
