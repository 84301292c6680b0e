"""Writes lines for the supervisor of a job on standard error, which reaches it from any host.

`hybrid-imagenet run` and the launch scripts give each job a random word in the environment. A line
that begins with the word is for the supervisor (`resilience.supervisor`), which takes it out of
what the user sees.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

JOB_VARIABLE = "HYBRID_IMAGENET_JOB"
_WORD = re.compile(r"[0-9a-f]{32}")
_LEFT = re.compile(rb" left (\d{1,6}) of (\d{1,6}) on (\S{1,255})\n?")


class Left(NamedTuple):
    """A rank whose program has come to its end without an error, as its last line says."""

    rank: int
    size: int
    host: str


def tell(text: str, environ: Mapping[str, str] | None = None) -> None:
    """Writes a line for the supervisor of this rank; does nothing in other processes."""
    word = (os.environ if environ is None else environ).get(JOB_VARIABLE, "")
    if _WORD.fullmatch(word):
        with contextlib.suppress(OSError):  # the supervisor has ended
            os.write(2, f"{word} {text}\n".encode())


def announce_left(rank: int, size: int) -> None:
    """Tells the supervisor that the program of this rank ends."""
    tell(f"left {rank} of {size} on {socket.gethostname()}")


def find_left(text: bytes) -> Left | None:
    """Returns what `announce_left` has written after the job's word in a line; None for anything
    else.
    """
    found = _LEFT.fullmatch(text)
    return Left(int(found[1]), int(found[2]), found[3].decode(errors="replace")) if found else None
