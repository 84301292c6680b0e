"""Tests that no invalid datagram is accepted, and that thousands of them do not end a watchdog."""

import itertools
import socket
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_imagenet.resilience import heartbeats, watchdog
from hybrid_imagenet.resilience.heartbeats import Heartbeat
from tests.resilience import hostile

TOKEN = "0123456789abcdef" * 2


KEY = TOKEN.encode()
DATAGRAM = hostile.VALID.encode(TOKEN)
INVALID = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe",
    "token only": KEY,
    "nested, without token": b"[" * 60000,
    "nested": KEY + b"[" * 8000,
    "infinite number": KEY + b'{"rank": 1e400}',
    "token, then not UTF-8": KEY + b"\xff" * 10,
    "token in capitals": TOKEN.upper().encode() + hostile.VALID.encode(""),
    "another token": hostile.VALID.encode("other"),
    "cut": DATAGRAM[:-1],
    "too long": DATAGRAM + b" " * 9000,
}


def test_decode_of_an_encoded_heartbeat_returns_it():
    assert Heartbeat.decode(DATAGRAM, TOKEN, 2) == hostile.VALID


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
def test_decode_of_an_invalid_datagram_returns_none(data):
    assert Heartbeat.decode(data, TOKEN, 2) is None


@pytest.mark.parametrize("values", [[], {}, 5, "x", [TOKEN, {}], {"rank": 1}], ids=str)
def test_decode_of_other_json_returns_none(values):
    assert Heartbeat.decode(hostile.encode_values(values, TOKEN), TOKEN, 2) is None


@pytest.mark.parametrize("name", hostile.INVALID_VALUES)
def test_decode_of_an_invalid_value_returns_none(name):
    for value in hostile.INVALID_VALUES[name]:
        data = hostile.encode_values(hostile.altered(name, value), TOKEN)
        assert Heartbeat.decode(data, TOKEN, 2) is None, value


def test_decode_parses_json_only_after_the_token_is_correct(monkeypatch):
    too_long = hostile.VALID.encode(TOKEN) + b" " * 9000
    monkeypatch.setattr(heartbeats.json, "loads", lambda text: pytest.fail("parsed"))
    for data in (b"[" * 60000, hostile.VALID.encode("other"), too_long):
        assert Heartbeat.decode(data, TOKEN) is None


def test_stall_report_escapes_and_shortens_texts_of_heartbeats():
    heartbeat = Heartbeat(1, "a\x1b[2Jb", 7, 3, 0.0, 0.1, ("x" * 10**5 + "\n.py:1 f",) * 30)
    log = heartbeats.HeartbeatLog(patience=10)
    log.record(Heartbeat.decode(heartbeat.encode(TOKEN), TOKEN), 0)
    first, *frames = log.find_stall(11).report.splitlines()
    assert "on a\\x1b[2Jb (" in first
    assert len(frames) == 12 and all(frame.isprintable() and len(frame) < 300 for frame in frames)
    assert frames[0].endswith("\\n.py:1 f")
    wide = Heartbeat(1, "h", 7, 3, 0.0, 0.1, ("\U0001f600" * 300,) * 12)
    assert len(wide.encode(TOKEN)) <= heartbeats.MAX_DATAGRAM_BYTES
    assert Heartbeat.decode(wide.encode(TOKEN), TOKEN) is not None


class Communicator:
    """Connects one of two ranks in this process."""

    def __init__(self, rank, barrier, values):
        self.rank = rank
        self.size = 2
        self.hosts = ("here", "here")
        self._barrier = barrier
        self._values = values

    def allgather_object(self, value):
        self._barrier.wait(10)
        self._values[self.rank] = value
        self._barrier.wait(10)
        return list(self._values)

    def broadcast_object(self, value):
        return self.allgather_object(value)[0]


def pair(limit):
    """Returns two watchdogs that receive each other's heartbeats."""
    barrier = threading.Barrier(2)
    values = [None, None]
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda rank: watchdog.Watchdog(Communicator(rank, barrier, values), limit), range(2)
            )
        )


def test_watchdogs_spread_their_heartbeats_over_the_interval(monkeypatch):
    dogs = [dog for _ in range(10) for dog in pair(20)]
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda self: None)
    # The clock stands still, because a loaded machine may take half a second between two lines.
    now = time.monotonic()
    monkeypatch.setattr(watchdog, "time", types.SimpleNamespace(monotonic=lambda: now))
    first = []
    second = []
    for dog in dogs:
        dog.start()
        first.append(dog._due - now)
        monkeypatch.setattr(dog, "_listen_until", lambda until: None)
        dog._run_cycle()
        second.append(dog._due - now)
        dog._close()
        assert 0 < first[-1] < dog._interval
        assert 0.8 * dog._interval <= second[-1] <= 1.2 * dog._interval
    # The interval is two seconds.
    assert max(first) - min(first) > 1
    assert max(second) - min(second) > 0.2


def test_watchdog_survives_hostile_datagrams(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    dogs = pair(20)
    for dog in dogs:
        dog.start()
    ports = [dog._socket.getsockname()[1] for dog in dogs]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for step, data in enumerate(itertools.islice(hostile.datagrams(1, dogs[0]._token), 4000)):
            sender.sendto(data, ("127.0.0.1", ports[step % 2]))
            if step % 100 == 0:
                for dog in dogs:
                    dog.record_progress(step)
    # Wait until a heartbeat arrives after the flood.
    began = time.monotonic()
    while dogs[0]._log._heartbeats.get(1, (None, 0.0))[1] < began:
        assert time.monotonic() < began + 10
        time.sleep(0.05)
    assert [dog._thread.is_alive() for dog in dogs] == [True, True]
    for dog in dogs:
        dog.stop()
    assert ended == []
    assert capfd.readouterr().err == ""


def test_watchdog_prints_an_error_once_and_continues(monkeypatch, capfd):
    dog, _ = pair(1)
    turns = []
    monkeypatch.setattr(dog, "_run_cycle", lambda: turns.append(1) or 1 / 0)
    dog.start()
    while len(turns) < 3:
        time.sleep(0.05)
    assert dog._thread.is_alive()
    dog.stop()
    assert capfd.readouterr().err.count("ZeroDivisionError") == 1
