"""Strange datagrams: none is taken for a beat, and none ends a watchdog, alone or by the
thousand.
"""

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


def test_strange_datagrams_are_passed_over():
    token, good = TOKEN.encode(), hostile.GOOD.encode(TOKEN)
    assert Heartbeat.decode(good, TOKEN, 2) == hostile.GOOD
    for data in (
        *(
            b"",
            b"\xff\xfe",
            token,
            b"[" * 60000,
            token + b"[" * 8000,
            token + b'{"rank": 1e400}',
            token + b"\xff" * 10,
        ),
        *(
            TOKEN.upper().encode() + hostile.GOOD.encode(""),
            hostile.GOOD.encode("other"),
            good[:-1],
            good + b" " * 9000,
        ),
        *(hostile.seal(value, TOKEN) for value in ([], {}, 5, "x", [TOKEN, {}], {"rank": 1})),
        *(
            hostile.seal(hostile.altered(name, value), TOKEN)
            for name in hostile.BAD
            for value in hostile.BAD[name]
        ),
    ):
        assert Heartbeat.decode(data, TOKEN, 2) is None, data[:300]


def test_nothing_is_parsed_before_the_token_is_compared(monkeypatch):
    too_long = hostile.GOOD.encode(TOKEN) + b" " * 9000
    monkeypatch.setattr(heartbeats.json, "loads", lambda text: pytest.fail("parsed"))
    for data in (b"[" * 60000, hostile.GOOD.encode("other"), too_long):
        assert Heartbeat.decode(data, TOKEN) is None


def test_escapes_and_long_texts_reach_no_terminal():
    beat = Heartbeat(1, "a\x1b[2Jb", 7, 3, 0.0, 0.1, ("x" * 10**5 + "\n.py:1 f",) * 30)
    log = heartbeats.HeartbeatLog(patience=10)
    log.record(Heartbeat.decode(beat.encode(TOKEN), TOKEN), 0)
    first, *frames = log.find_stall(11).report.splitlines()
    assert "on a\\x1b[2Jb (" in first
    assert len(frames) == 12 and all(frame.isprintable() and len(frame) < 300 for frame in frames)
    assert frames[0].endswith("\\n.py:1 f")
    wide = Heartbeat(1, "h", 7, 3, 0.0, 0.1, ("\U0001f600" * 300,) * 12)
    assert len(wide.encode(TOKEN)) <= heartbeats.MAX_DATAGRAM_BYTES
    assert Heartbeat.decode(wide.encode(TOKEN), TOKEN) is not None


class Ranks:
    """Two ranks of this process."""

    def __init__(self, rank, barrier, given):
        self.rank, self.size, self.hosts = rank, 2, ("here", "here")
        self._barrier, self._given = barrier, given

    def allgather_object(self, value):
        self._barrier.wait(10)
        self._given[self.rank] = value
        self._barrier.wait(10)
        return list(self._given)

    def broadcast_object(self, value):
        return self.allgather_object(value)[0]


def pair(limit):
    """Two watchdogs that hear each other."""
    barrier, given = threading.Barrier(2), [None, None]
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda rank: watchdog.Watchdog(Ranks(rank, barrier, given), limit), range(2))
        )


def test_beats_of_many_ranks_are_spread_over_the_interval(monkeypatch):
    dogs = [dog for _ in range(10) for dog in pair(20)]
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda self: None)
    now = (
        time.monotonic()
    )  # a clock that stands still: a loaded machine takes half a second between two lines
    monkeypatch.setattr(watchdog, "time", types.SimpleNamespace(monotonic=lambda: now))
    due, sent = [], []
    for dog in dogs:
        dog.start()
        due.append(dog._due - now)
        monkeypatch.setattr(dog, "_listen_until", lambda until: None)
        dog._run_cycle()
        sent.append(dog._due - now)
        dog._close()
        assert 0 < due[-1] < dog._interval
        assert 0.8 * dog._interval <= sent[-1] <= 1.2 * dog._interval
    assert max(due) - min(due) > 1 and max(sent) - min(sent) > 0.2  # the interval is two seconds


def test_hostile_datagrams_do_not_stop_a_watchdog(monkeypatch, capfd):
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
    began = time.monotonic()
    while dogs[0]._log._heartbeats.get(1, (None, 0.0))[1] < began:  # a beat from after the flood
        assert time.monotonic() < began + 10
        time.sleep(0.05)
    assert [dog._thread.is_alive() for dog in dogs] == [True, True]
    for dog in dogs:
        dog.stop()
    assert ended == []
    assert capfd.readouterr().err == ""


def test_an_error_in_a_turn_is_told_once_and_the_watch_goes_on(monkeypatch, capfd):
    dog, _ = pair(1)
    turns = []
    monkeypatch.setattr(dog, "_run_cycle", lambda: turns.append(1) or 1 / 0)
    dog.start()
    while len(turns) < 3:
        time.sleep(0.05)
    assert dog._thread.is_alive()
    dog.stop()
    assert capfd.readouterr().err.count("ZeroDivisionError") == 1
