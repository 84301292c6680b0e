"""Datagrams that mean harm, seeded.

Those that carry the run's token are none that a rank would send: each has a value that a beat
cannot have.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator

from hybrid_imagenet.resilience import heartbeats

LARGEST = 65507  # bytes that a datagram can carry
GOOD = heartbeats.Heartbeat(1, "here", 7, 3, 0.0, 0.1, ("a.py:1 f",))
_NUMBERS = (-1, True, "1", [], {}, 1 << 63, 10**400, float("nan"), float("inf"))
BAD = {
    "rank": (*_NUMBERS, None, 1.5, 2, 10**9),
    "host": (None, 5, ["here"], {}),
    "process": (*_NUMBERS, None, 1.5),
    "step": (*_NUMBERS, 1.5),
    "idle_seconds": (*_NUMBERS, None),
    "mean_step_seconds": (*_NUMBERS, None),
    "stack": (None, "a.py:1 f", 5, [5], [None], ["x"] * 13, {"a": 1}, [["a"]]),
    "leaving": (None, 0, 1, "yes", []),
}


def seal(values: object, token: str) -> bytes:
    """A datagram of any JSON values behind a token."""
    return (token + json.dumps(values)).encode()


def altered(name: str, value: object) -> dict:
    """The good beat with another value."""
    return dataclasses.asdict(GOOD) | {name: value}


def datagrams(seed: int, token: str) -> Iterator[bytes]:
    """Endless datagrams of every kind, from nothing to the largest."""
    chance = random.Random(seed)
    while True:
        size, name = chance.choice((0, 1, 33, 500, 8191, 8193, LARGEST)), chance.choice(list(BAD))
        nested = chance.choice((b"[", b'{"a":', b'["', b"\x00", b"9")) * (size // 2)
        yield chance.choice(
            (
                chance.randbytes(size),
                nested,
                token.encode() + nested,
                token.encode() + b"\xff" + chance.randbytes(size),
                GOOD.encode(
                    chance.choice((token.upper() + "x", token[:-1], "", token[::-1] + "y"))
                ),
                seal(altered(name, chance.choice(BAD[name])), token),
                seal(chance.choice(([], {}, "x", 5, None, altered("evil", 1))), token),
            )
        )[:LARGEST]
