"""The lines at the bottom of a terminal: what is written to keep them there once."""

import io
import os
import pty
import socket
import sys

import pytest
from rich.text import Text

from hybrid_imagenet.runlog import live_rich

UP = "\x1b[1A"


@pytest.fixture
def resize(monkeypatch):
    """Sets the size that a stream without a terminal is taken to have."""
    monkeypatch.delenv(live_rich.VARIABLE, raising=False)

    def resize(columns, rows=24):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))

    return resize


class Recorder(io.StringIO):
    def new(self):
        """What was written since the last call."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.mark.parametrize(("columns", "rows"), [(100, 2), (60, 2), (40, 3), (20, 5)])
def test_as_many_rows_are_erased_as_the_lines_take_at_the_new_width(resize, columns, rows):
    """A terminal that has become narrower has broken a line of 60 and one of 30 cells."""
    resize(100)
    stream = Recorder()
    shown = live_rich.Area(stream)
    shown.draw(Text("a" * 60 + "\n" + "b" * 30))
    assert UP not in stream.new()
    resize(columns)
    shown.print(Text("above"))
    written = stream.new()
    assert written.count(UP) == rows - 1
    assert written.index("above") < written.index("aaa") < written.index("bbb")
    shown.close()
    assert stream.new().count(UP) >= 1


def test_what_others_print_stands_above_the_area(resize):
    resize(80)
    stream, before = Recorder(), sys.stdout
    shown = live_rich.Area(stream)
    shown.draw(Text("the area"))
    stream.new()
    print("from a callback")
    written = stream.new()
    assert written.index("from a callback") < written.index("the area")
    shown.close()
    assert sys.stdout is before


def test_a_terminal_lower_than_the_area_shows_its_first_lines(resize):
    resize(80, rows=3)
    stream = Recorder()
    live_rich.Area(stream).draw(Text("one\ntwo\nthree"))
    written = stream.new()
    assert "one" in written and "two" in written and "three" not in written


def test_ranks_ask_the_launchers_terminal_for_its_size(resize, monkeypatch):
    resize(51, 22)
    master, slave = pty.openpty()
    try:
        expected = os.get_terminal_size(slave)
        monkeypatch.setenv(live_rich.VARIABLE, f"{socket.gethostname()}:{os.ttyname(slave)}")
        assert live_rich.size(io.StringIO()) == expected != (51, 22)
        monkeypatch.setenv(live_rich.VARIABLE, "another.host:/dev/pts/0")
        assert live_rich.size(io.StringIO()) == (51, 22)
    finally:
        os.close(master)
        os.close(slave)
