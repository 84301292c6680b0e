"""Generates seeded datagrams that a hostile sender might send.

Even those that carry the run's token are not valid: each has a value that a heartbeat cannot have.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator

from hybrid_imagenet.resilience import heartbeats

# The largest datagram that UDP can carry.
MAX_DATAGRAM_BYTES = 65507
VALID = heartbeats.Heartbeat(1, "here", 7, 3, 0.0, 0.1, ("a.py:1 f",))
_NUMBERS = (-1, True, "1", [], {}, 1 << 63, 10**400, float("nan"), float("inf"))
INVALID_VALUES = {
    "rank": (*_NUMBERS, None, 1.5, 2, 10**9),
    "host": (None, 5, ["here"], {}),
    "process": (*_NUMBERS, None, 1.5),
    "step": (*_NUMBERS, 1.5),
    "idle_seconds": (*_NUMBERS, None),
    "mean_step_seconds": (*_NUMBERS, None),
    "stack": (None, "a.py:1 f", 5, [5], [None], ["x"] * 13, {"a": 1}, [["a"]]),
    "leaving": (None, 0, 1, "yes", []),
}


def encode_values(values: object, token: str) -> bytes:
    """Returns a datagram of any JSON values after a token."""
    return (token + json.dumps(values)).encode()


def altered(name: str, value: object) -> dict:
    """Returns the attributes of a valid heartbeat with one of them changed."""
    return dataclasses.asdict(VALID) | {name: value}


def datagrams(seed: int, token: str) -> Iterator[bytes]:
    """Yields datagrams of every kind and size, without end."""
    chance = random.Random(seed)
    while True:
        size = chance.choice((0, 1, 33, 500, 8191, 8193, MAX_DATAGRAM_BYTES))
        name = chance.choice(list(INVALID_VALUES))
        nested = chance.choice((b"[", b'{"a":', b'["', b"\x00", b"9")) * (size // 2)
        yield chance.choice(
            (
                chance.randbytes(size),
                nested,
                token.encode() + nested,
                token.encode() + b"\xff" + chance.randbytes(size),
                VALID.encode(
                    chance.choice((token.upper() + "x", token[:-1], "", token[::-1] + "y"))
                ),
                encode_values(altered(name, chance.choice(INVALID_VALUES[name])), token),
                encode_values(chance.choice(([], {}, "x", 5, None, altered("evil", 1))), token),
            )
        )[:MAX_DATAGRAM_BYTES]
