"""What is said while a run starts."""

import io
import sys
import time

import pytest

from hybrid_imagenet import __main__, startup
from tests.support.processes import wait_for

KIND = "resnet50, digits, 2 ranks x 32 images"


@pytest.fixture
def start(monkeypatch):
    monkeypatch.delenv(startup.COMMAND_START_VARIABLE, raising=False)
    now = [1000.0]
    monkeypatch.setattr(startup, "clock", lambda: now[0])

    def run():
        stream, start = io.StringIO(), startup.StartupProgress()
        start.open(KIND, stream, terminal=False)
        for stage, took in (("loading TensorFlow", 8.0), ("connecting 2 ranks", 2.0)):
            start.begin(stage)
            now[0] += took
        start.finish()
        return stream.getvalue()

    return run


def test_each_stage_is_shown_and_at_the_end_what_each_took(start):
    assert start().splitlines() == [
        KIND,
        "loading TensorFlow ...",
        "connecting 2 ranks ...",
        "first step after 10.0 s: loading TensorFlow 8.0 s, connecting 2 ranks 2.0 s",
    ]


def test_the_time_of_the_launcher_counts(start, monkeypatch):
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, f"997.5@{startup._boot()}")
    assert "first step after 12.5 s: starting the ranks 2.5 s, loading" in start()


@pytest.mark.parametrize(
    "value", ["997.5@another", "997.5", "20000.0@{boot}", "-4000.0@{boot}", "x@{boot}", ""]
)
def test_a_launcher_whose_time_is_not_comparable_does_not_count(start, monkeypatch, value):
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, value.format(boot=startup._boot()))
    assert "first step after 10.0 s: loading" in start()


def test_a_jump_of_the_clock_of_the_day_does_not_change_the_time_of_a_start(monkeypatch):
    monkeypatch.delenv(startup.COMMAND_START_VARIABLE, raising=False)
    startup.record_command_start()
    stream, start = io.StringIO(), startup.StartupProgress()
    start.open(KIND, stream, terminal=False)
    start.begin("loading TensorFlow")
    monkeypatch.setattr(startup.time, "time", lambda: 0.0)
    start.finish()
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("first step after 0.") and "loading TensorFlow 0.0 s" in line
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, "")  # so that it is taken away again


def test_on_a_terminal_one_line_counts_the_seconds(monkeypatch):
    monkeypatch.setattr(startup, "_TICK", 0.01)
    stream, start = io.StringIO(), startup.StartupProgress()
    start.open(KIND, stream, terminal=True)
    start.begin("loading TensorFlow")
    wait_for(lambda: "loading TensorFlow ... 0 s" in stream.getvalue())
    with start.hidden():
        stream.write("a message\n")
    time.sleep(0.05)
    start.finish()
    # What stands before the last clearing of a line is not seen.
    lines = [line.rpartition("\x1b[K")[2] for line in stream.getvalue().split("\n")[:-1]]
    assert lines[:2] == [KIND, "a message"]
    assert lines[2].startswith("first step after 0.")
    assert len(lines) == 3


def test_nothing_is_said_before_it_is_opened(capsys):
    start = startup.StartupProgress()
    start.begin("loading TensorFlow")
    with start.hidden():
        start.finish()
    start.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("progress", "ranks", "told", "shown"),
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
def test_a_rank_believes_its_launcher(monkeypatch, progress, ranks, told, shown):
    monkeypatch.setenv("HYBRID_IMAGENET_TERMINAL", told)
    assert startup.is_terminal_output(progress, ranks) is shown


def test_without_a_launcher_the_stream_tells(monkeypatch):
    monkeypatch.delenv("HYBRID_IMAGENET_TERMINAL", raising=False)
    for tty, term, shown in ((True, "xterm", True), (False, "xterm", False), (True, "dumb", False)):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr("sys.stdout.isatty", lambda tty=tty: tty, raising=False)
        assert startup.is_terminal_output("auto", 1) is shown


def test_the_train_command_notes_when_it_began(monkeypatch):
    """A single process has no launcher that would."""
    monkeypatch.delenv(startup.COMMAND_START_VARIABLE, raising=False)
    monkeypatch.setattr("hybrid_imagenet.comm.environment.restart_with_huge_pages", lambda: None)
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
    monkeypatch.setenv(startup.COMMAND_START_VARIABLE, "")  # so that it is taken away again
    assert seen[0] == pytest.approx(before, abs=2)  # and not the 9 s later at which it is asked for
