"""The live view on a pseudo-terminal of several sizes, resized while it is drawn."""

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from hybrid_imagenet.resilience import supervisor
from hybrid_imagenet.runlog import area, live
from tests.runlog.test_live import INFO, Clock, epoch_record, step_record
from tests.support.screen import Screen

AREA = ("epoch 1/5", "step ", "training", "speed", "phase")


class Terminal:
    """A pseudo-terminal and what it shows."""

    def __init__(self, columns, rows=24):
        self.master, self.slave = pty.openpty()
        modes = termios.tcgetattr(self.slave)
        modes[1] &= ~termios.OPOST  # the screen gets what the program writes
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        os.set_blocking(self.master, False)
        self.screen, self.written = Screen(columns), b""
        self.resize(columns, rows)
        self.stream = os.fdopen(os.dup(self.slave), "w", encoding="utf-8")

    def resize(self, columns, rows=24):
        self.lines()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(columns)

    def lines(self):
        while True:
            try:
                self.written += os.read(self.master, 1 << 16)
            except BlockingIOError:
                break
        self.screen.feed(self.written.decode().replace("\n", "\r\n"))
        self.written = b""
        return self.screen.lines()

    def close(self):
        self.stream.close()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv(area.VARIABLE, raising=False)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    opened = []

    def make(columns, rows=24):
        opened.append(Terminal(columns, rows))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def assert_once(lines):
    for part in AREA:
        assert sum(line.startswith(part) for line in lines) == 1, (part, lines)


@pytest.mark.parametrize("sizes", [(100, 60, 140), (60, 41, 100), (140, 70, 45, 140, 60)])
def test_the_area_stands_once_whatever_the_terminals_size_becomes(terminal, sizes):
    screen, clock = terminal(sizes[0]), Clock()
    view = live.make_view("live", screen.stream, 5, clock=clock)
    view.run_started(INFO)
    for number, columns in enumerate(sizes):
        if number:
            screen.resize(columns)
        for step in (2 * number + 1, 2 * number + 2):
            clock.now += 1
            view.step(step_record(step, phase=1.0))
        view.message(f"message {number}")
        lines = screen.lines()
        assert_once(lines)
        assert [line for line in lines if line.startswith("message")] == [f"message {k}" for k in range(number + 1)]
        assert max(map(len, lines)) <= max(sizes)
        assert lines.index(f"message {number}") < next(
            k for k, line in enumerate(lines) if line.startswith("epoch 1/5")
        )
    view.run_finished()
    assert screen.lines() == [f"message {k}" for k in range(len(sizes))]


def test_what_others_print_stands_above_the_area(terminal):
    screen, clock = terminal(80), Clock()
    before = sys.stdout
    view = live.make_view("live", screen.stream, 5, clock=clock)
    view.run_started(INFO)
    view.step(step_record(1, phase=1.0))
    print("from a callback")
    screen.resize(50)
    view.epoch(epoch_record(1, 0.5))
    lines = screen.lines()
    assert lines[0] == "from a callback"
    assert lines[1].startswith("epoch   1  loss 1.2500")
    assert_once(lines)
    view.run_finished()
    assert sys.stdout is before


def test_a_terminal_lower_than_the_area_shows_its_first_lines(terminal):
    screen, clock = terminal(80, rows=4), Clock()
    view = live.make_view("live", screen.stream, 5, clock=clock)
    view.run_started(INFO)
    for step in (1, 2, 3):
        clock.now += 1
        view.step(step_record(step, phase=1.0))
    assert [line.split()[0] for line in screen.lines()] == ["epoch", "step", "training"]


def test_ranks_ask_the_launchers_terminal_for_its_size(terminal, monkeypatch, tmp_path):
    screen = terminal(77, rows=33)
    with (tmp_path / "pipe").open("w") as other:
        monkeypatch.setattr(sys, "stdout", screen.stream)
        monkeypatch.setenv(area.VARIABLE, supervisor._terminal()[area.VARIABLE])
        assert area.size(other) == (77, 33)
        monkeypatch.setenv(area.VARIABLE, "another.host:/dev/pts/0")
        monkeypatch.setenv("COLUMNS", "51")
        monkeypatch.setenv("LINES", "22")
        assert area.size(other) == (51, 22)
