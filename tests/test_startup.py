"""Tests of `hybrid_imagenet.startup`."""

import io
import sys
import time

import pytest

from hybrid_imagenet import __main__, startup
from tests.support.processes import wait_for

TITLE = "resnet50, digits, 2 ranks x 32 images"


@pytest.fixture
def start(monkeypatch):
    monkeypatch.delenv(startup.COMMAND_START_VARIABLE, raising=False)
    now = [1000.0]
    monkeypatch.setattr(startup, "clock", lambda: now[0])

    def run():
        stream, start = io.StringIO(), startup.StartupProgress()
        start.open(TITLE, stream, terminal=False)
        for stage, took in (("loading TensorFlow", 8.0), ("connecting 2 ranks", 2.0)):
            start.begin(stage)
            now[0] += took
        start.finish()
        return stream.getvalue()

    return run


def test_startup_progress_shows_each_stage_and_at_the_end_its_seconds(start):
    assert start().splitlines() == [
        TITLE,
        "loading TensorFlow ...",
        "connecting 2 ranks ...",
        "first step after 10.0 s: loading TensorFlow 8.0 s, connecting 2 ranks 2.0 s",
    ]


def test_startup_progress_counts_from_the_start_of_the_command(start, monkeypatch):
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, f"997.5@{startup._boot_id()}")
    assert "first step after 12.5 s: starting the ranks 2.5 s, loading" in start()


@pytest.mark.parametrize(
    "value", ["997.5@another", "997.5", "20000.0@{boot}", "-4000.0@{boot}", "x@{boot}", ""]
)
def test_startup_progress_ignores_a_command_start_that_is_not_comparable(start, monkeypatch, value):
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, value.format(boot=startup._boot_id()))
    assert "first step after 10.0 s: loading" in start()


def test_startup_progress_does_not_depend_on_the_time_of_day(monkeypatch):
    monkeypatch.delenv(startup.COMMAND_START_VARIABLE, raising=False)
    startup.record_command_start()
    stream, start = io.StringIO(), startup.StartupProgress()
    start.open(TITLE, stream, terminal=False)
    start.begin("loading TensorFlow")
    monkeypatch.setattr(startup.time, "time", lambda: 0.0)
    start.finish()
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("first step after 0.") and "loading TensorFlow 0.0 s" in line
    # pytest removes this variable again after the test, because it was set here.
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, "")


def test_startup_progress_on_a_terminal_rewrites_one_line(monkeypatch):
    monkeypatch.setattr(startup, "_REFRESH_SECONDS", 0.01)
    stream, start = io.StringIO(), startup.StartupProgress()
    start.open(TITLE, stream, terminal=True)
    start.begin("loading TensorFlow")
    wait_for(lambda: "loading TensorFlow ... 0 s" in stream.getvalue())
    with start.hidden():
        stream.write("a message\n")
    time.sleep(0.05)
    start.finish()
    # A terminal shows only what was written after a line was last cleared.
    lines = [line.rpartition("\x1b[K")[2] for line in stream.getvalue().split("\n")[:-1]]
    assert lines[:2] == [TITLE, "a message"]
    assert lines[2].startswith("first step after 0.")
    assert len(lines) == 3


def test_startup_progress_before_open_prints_nothing(capsys):
    start = startup.StartupProgress()
    start.begin("loading TensorFlow")
    with start.hidden():
        start.finish()
    start.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("progress", "ranks", "terminal", "shown"),
    [
        ("live", 1, "0", True),
        ("plain", 2, "host:/dev/pts/1", False),
        ("auto", 2, "host:/dev/pts/1", True),
        ("auto", 2, "0", False),
        ("none", 1, "0", False),
        ("auto", 1, "host:/dev/pts/1", True),
        ("auto", 1, "0", False),
    ],
)
def test_is_terminal_output_follows_the_launcher(monkeypatch, progress, ranks, terminal, shown):
    monkeypatch.setenv("HYBRID_IMAGENET_TERMINAL", terminal)
    assert startup.is_terminal_output(progress, ranks) is shown


def test_is_terminal_output_without_a_launcher_follows_the_stream(monkeypatch):
    monkeypatch.delenv("HYBRID_IMAGENET_TERMINAL", raising=False)
    for tty, term, shown in ((True, "xterm", True), (False, "xterm", False), (True, "dumb", False)):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr("sys.stdout.isatty", lambda tty=tty: tty, raising=False)
        assert startup.is_terminal_output("auto", 1) is shown


def test_train_command_records_its_start(monkeypatch):
    # A single process has no launcher that would record the start.
    monkeypatch.delenv(startup.COMMAND_START_VARIABLE, raising=False)
    monkeypatch.setattr("hybrid_imagenet.cluster.environment.restart_with_huge_pages", lambda: None)
    monkeypatch.setattr(sys, "argv", ["hybrid-imagenet", "train"])
    for changes_signals in ("install", "ignore"):
        monkeypatch.setattr(
            f"hybrid_imagenet.resilience.stop_signals.REQUESTS.{changes_signals}", lambda: None
        )
    monkeypatch.setattr("hybrid_imagenet.resilience.lossy_stream.install", lambda **options: None)
    seen = []
    monkeypatch.setattr(
        "hybrid_imagenet.main.main",
        lambda words: seen.append(startup.command_start(startup.clock() + 9)),
    )
    before = startup.clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        assert __main__.main() == 0
    # pytest removes this variable again after the test, because it was set here.
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, "")
    # Without a recorded start, it would be the default, which is 9 s later.
    assert seen[0] == pytest.approx(before, abs=2)
