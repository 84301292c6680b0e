"""Tests the drawing of dev/recording.py, and that docs/recording.svg shows today's lines."""

import html
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.launch.shell import ROOT


@pytest.fixture(scope="module")
def recording():
    spec = importlib.util.spec_from_file_location("recording", ROOT / "dev" / "recording.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["recording"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lines(recording):
    """Returns two commands with a report of three lines, and waits of up to 100 s."""
    report = [recording.Line(100.0, f"stall: {number} <x>") for number in range(3)]
    return [
        recording.Line(0.0, "first", typed=True),
        recording.Line(1.0, "prints"),
        *report,
        recording.Line(101.0, "error: it was stopped"),
        recording.Line(0.0, "second", typed=True),
        *(recording.Line(float(number), "x" * 200) for number in range(1, 30)),
    ]


def test_times_in_the_drawing_end_one_pause_before_it_starts_again(recording, lines):
    times = recording.times_in_the_drawing(lines)
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert times[-1] == pytest.approx(recording.SECONDS - recording.PAUSE_SECONDS)
    # After the report and after the first command, the reader has time.
    assert min(waits[4], waits[5]) >= recording.PAUSE_SECONDS
    assert max(waits[:4] + waits[6:]) < recording.PAUSE_SECONDS


def test_draw_shows_each_line_once_in_order_within_the_width(recording, lines):
    root = ElementTree.fromstring(recording.draw(lines))
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    shown = [text.text or "" for text in texts if text.get("class") != "time"]
    assert shown[:2] == ["$ first", "prints"]
    assert shown[2] == "stall: 0 <x>"
    assert len(shown) == len(lines)
    assert {len(text) for text in shown[7:]} == {recording.COLUMNS}
    (animation,) = root.iter("{http://www.w3.org/2000/svg}animateTransform")
    # The last offset moves the last line to the bottom of the screen.
    last_offset = -(len(lines) - recording.ROWS) * recording.LINE_HEIGHT
    assert animation.get("values").split(";")[-1] == f"0 {last_offset}"


def test_process_of_rank_finds_a_grandchild_and_no_other_rank(recording):
    # The rank prints its number itself, because it has its variables only once it runs.
    script = "OMPI_COMM_WORLD_RANK=1 bash -c 'echo $$; exec sleep 60' & wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        rank = int(shell.stdout.readline())
        try:
            assert recording.process_of_rank(1, os.getpid()) == rank
            with pytest.raises(LookupError):
                recording.process_of_rank(7, shell.pid)
        finally:
            os.kill(rank, 9)


def test_recording_shows_the_report_of_the_hang_and_the_resume(recording):
    text = html.unescape(recording.OUTPUT.read_text())
    stages = [
        f"$ {recording.START[:60]}",
        recording.LAST_ROW_BEFORE_THE_HANG,
        r"stall: rank 1 on \S+ \(process \d+\) has been silent for \d+ s \(last step: \d+\)",
        r"error: rank 1 on \S+ hung for \d+ s, so the job was stopped \(--stall_timeout=20\)",
        f"next: {recording.RESUME}<",
        f"$ {recording.RESUME}<",
        r"resumed at epoch \d+\.\d+, step \d+",
        r" 6/6 \|.*next: hybrid-imagenet report",
    ]
    patterns = [stage if "\\" in stage else re.escape(stage) for stage in stages]
    assert re.search(".*".join(patterns), text, re.S)


def test_recording_has_the_same_row_before_the_hang_and_after_the_resume(recording):
    text = html.unescape(recording.OUTPUT.read_text())
    rows = re.findall(rf">{re.escape(recording.LAST_ROW_BEFORE_THE_HANG)}([^<]*)<", text)
    losses_and_accuracies = {tuple(row.split("|")[:5]) for row in rows}
    assert len(rows) == 2
    assert len(losses_and_accuracies) == 1
