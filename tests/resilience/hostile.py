"""Datagrams that mean harm: `python -m tests.resilience.hostile PORT[,PORT] SECONDS` sends them to ports of this host.

Seeded. Those that carry the run's token are none that a rank would send: each has a value that a beat cannot have.
"""

from __future__ import annotations

import dataclasses
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator

from hybrid_imagenet.resilience import heartbeats
from hybrid_imagenet.resilience.datagrams import seal

LARGEST = 65507  # bytes that a datagram can carry
GOOD = heartbeats.Beat(1, "here", 7, 3, 0.0, 0.1, ("a.py:1 f",))
_NUMBERS = (-1, 1.5, True, None, "1", [], {}, 1 << 63, 10**400, -(10**30))
BAD = {
    "rank": (*_NUMBERS, 2, 10**9),
    "host": (None, 5, ["here"], {}),
    "process": _NUMBERS,
    "step": tuple(value for value in _NUMBERS if value is not None),
    "idle": (-1, -0.5, None, "long", [], True, {}),
    "mean": (-1, None, "1", [1], False),
    "stack": (None, "a.py:1 f", 5, [5], [None], ["x"] * 13, {"a": 1}, [["a"]]),
    "leaving": (None, 0, 1, "yes", []),
}
# Numbers that Python's JSON reads and no other: written by hand.
_LITERALS = ("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000, "1e-400000", "-0.1")


def datagrams(seed: int, token: str) -> Iterator[bytes]:
    """Endless datagrams of every kind, from nothing to the largest."""
    generator = random.Random(seed)
    kinds: tuple[Callable[[random.Random, str], bytes], ...] = (
        _noise, _nested, _foreign, _sealed_noise, _sealed_nested, _sealed_value, _sealed_literal, _fields,
    )  # fmt: skip
    while True:
        yield generator.choice(kinds)(generator, token)[:LARGEST]


def _size(generator: random.Random) -> int:
    return int(
        min(LARGEST, generator.choice((0, 1, 31, 32, 33, 500, 8191, 8192, 8193, LARGEST, 2**16 * generator.random())))
    )


def _noise(generator: random.Random, token: str) -> bytes:
    return generator.randbytes(_size(generator))


def _nested(generator: random.Random, token: str) -> bytes:
    return generator.choice((b"[", b'{"a":', b'[{"a":', b'["', b"\x00", b"9", b"\\u")) * 1 * (_size(generator) // 2)


def _foreign(generator: random.Random, token: str) -> bytes:
    """A beat of another run, or cut, or with a token that is nearly right."""
    other = generator.choice((token.upper(), token[:-1] + "x", token[:-1], "", "é" * 32, token[::-1]))
    data = GOOD.encode(other if other != token else "")
    return data[: generator.randrange(len(data) + 1)] if generator.random() < 0.5 else data


def _sealed_noise(generator: random.Random, token: str) -> bytes:
    return token.encode() + b"\xff" + generator.randbytes(_size(generator))


def _sealed_nested(generator: random.Random, token: str) -> bytes:
    return token.encode() + _nested(generator, token)


def _values() -> dict:
    return json.loads(json.dumps(dataclasses.asdict(GOOD)))


def _sealed_value(generator: random.Random, token: str) -> bytes:
    name = generator.choice(list(BAD))
    return seal({**_values(), name: generator.choice(BAD[name])}, token)


def _sealed_literal(generator: random.Random, token: str) -> bytes:
    name = generator.choice(("rank", "process", "step", "idle", "mean"))
    literal = generator.choice(_LITERALS[:-2] if name in ("idle", "mean") else _LITERALS)
    if name in ("idle", "mean") and literal == "9" * 5000:
        literal = "NaN"
    text = json.dumps({**_values(), name: "HERE"}).replace('"HERE"', literal)
    return token.encode() + text.encode()


def _fields(generator: random.Random, token: str) -> bytes:
    values = _values()
    if generator.random() < 0.5:
        del values[generator.choice(list(values))]
    else:
        values[generator.choice(("evil", "__class__", "self", ""))] = 1
    return seal(generator.choice((values, [values], [], {}, "x", 5, None, [token, values])), token)


def flood(ports: list[int], seconds: float, seed: int = 0, token: str = "0" * 32) -> int:
    """Sends for a time; how many."""
    sent, until, source = 0, time.monotonic() + seconds, datagrams(seed, token)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        while time.monotonic() < until:
            sender.sendto(next(source), ("127.0.0.1", ports[sent % len(ports)]))
            sent += 1
    return sent


if __name__ == "__main__":
    print(flood([int(port) for port in sys.argv[1].split(",")], float(sys.argv[2])))
