"""Seals and opens small datagrams between the ranks of a run; parses only those that carry the run's token.

Anybody who reaches a rank's port may send it anything. What does not begin with the token costs a comparison.
"""

from __future__ import annotations

import hmac
import json
import math
from typing import Any

MAX_BYTES = 8192  # of a datagram; longer ones are dropped unread


def seal(values: Any, token: str) -> bytes:
    """Returns the datagram that carries `values` (JSON), after the token."""
    return token.encode() + json.dumps(values).encode()


def unseal(data: bytes, token: str) -> Any:
    """Returns what `seal` was given; None for a datagram that is too long, has another token or is not JSON."""
    key = token.encode()
    if len(data) > MAX_BYTES or not hmac.compare_digest(data[: len(key)], key):
        return None
    try:
        return json.loads(data[len(key) :])
    except (ValueError, RecursionError):
        return None


def whole(value: Any, below: float = math.inf) -> bool:
    """Returns whether a value is a whole number from 0 that fits 63 bits and is less than `below`."""
    return type(value) is int and 0 <= value < min(below, 1 << 63)


def duration(value: Any) -> bool:
    """Returns whether a value is a finite number from 0."""
    return type(value) in (int, float) and 0 <= value < math.inf


def printable(text: str, longest: int) -> str:
    """Returns the end of a text, with what a terminal would obey escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[-longest:])
