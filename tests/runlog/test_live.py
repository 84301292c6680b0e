import io
import os
import pty
import re
import socket
import termios

import pytest

from hybrid_imagenet.runlog import live, summary
from hybrid_imagenet.runlog.progress import EpochTable, RunStatus, format_remaining_time

INFO = {"world_size": 4, "images_per_epoch": 1000, "single_gpu_images_per_second": 30.0}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def step_record(step, **more):
    return {
        "kind": "step",
        "epoch": (step - 1) // 10 + 1,
        "step": step,
        "position": step / 10,
        "train_loss": 1.5,
        "train_top1": 0.25,
        "images_per_second": 100.0,
        "learning_rate": 0.4,
        **more,
    }


def epoch_record(epoch, top1, **more):
    return {
        "kind": "epoch",
        "epoch": epoch,
        "step": 10 * epoch,
        "train_loss": 1.25,
        "val_loss": 1.0,
        "val_top1": top1,
        "val_top5": 0.9,
        "images_per_second": 100.0,
        "validation_seconds": 2.0,
        **more,
    }


def cells(line):
    return [cell.strip() for cell in line.split("|")]


def test_remaining_time_counts_images_and_validations():
    status = RunStatus(INFO, total_epochs=5)
    assert status.remaining_seconds() is None
    status.step(step_record(5))
    assert (status.epoch, status.epoch_fraction) == (1, 0.5)
    # No validation has been measured yet.
    assert status.remaining_seconds() == pytest.approx(4.5 * 10)
    status.epoch_done(epoch_record(1, 0.5))
    assert (status.epoch, status.epoch_fraction) == (1, 1.0)
    assert status.remaining_seconds() == pytest.approx(4 * 12)
    status.advance(13, 1.3)
    assert (status.epoch, status.epoch_fraction) == (2, pytest.approx(0.3))
    assert status.efficiency() == pytest.approx(100 / 120)


def test_remaining_time_ignores_compilation():
    status = RunStatus(INFO, total_epochs=5)
    # After the first step, the rate is 100 images/s.
    status.step(step_record(5))
    compiled = {
        "images_per_second": 10.0,
        "validation_seconds": 30.0,
        "validation_start_seconds": 28.0,
    }
    status.epoch_done(epoch_record(1, 0.5) | compiled)
    assert status.remaining_seconds() == pytest.approx(4 * 12)
    status.epoch_done(epoch_record(2, 0.5, validation_seconds=3.0) | {"images_per_second": 50.0})
    assert status.remaining_seconds() == pytest.approx(3 * 22)


def test_run_status_of_a_resumed_run_begins_at_its_step():
    status = RunStatus({**INFO, "step": 30, "epochs": 3}, total_epochs=5)
    assert (status.epoch, status.steps_done, status.position) == (4, 30, 3)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"phase": 0.0, "learning_rate": 2.4, "lower_bound": 0.24, "upper_bound": 902.4},
            "AdaBound, learning rate 2.4, bounds 0.24 to 902.4",
        ),
        (
            {"phase": 0, "learning_rate": 2.4, "lower_bound": 0.0, "upper_bound": None},
            "AdaBound, learning rate 2.4, bounds 0 to infinity",
        ),
        (
            {"phase": 1.0, "learning_rate": 2.4, "lower_bound": 2.4, "upper_bound": 2.4},
            "SGD, learning rate 2.4",
        ),
        ({"learning_rate": 0.1}, "learning rate 0.1"),
        ({}, None),
    ],
)
def test_phase_text_names_the_phase_and_its_hyperparameters(values, text):
    status = RunStatus(INFO, 5)
    status.values = values
    assert status.phase_text() == text


def test_target_text_names_the_first_epoch_also_after_a_resume():
    status = RunStatus({**INFO, "target": 0.75, "validated": [(10, 0.7)]}, 90)
    assert status.target_text() is None
    status.epoch_done(epoch_record(11, 0.76))
    again = RunStatus(
        {**INFO, "target": 0.75, "epochs": 12, "validated": [(10, 0.7), (11, 0.76), (12, 0.74)]}, 90
    )
    again.epoch_done(epoch_record(13, 0.77))
    assert status.target_text() == again.target_text() == "reached target 75 % in epoch 11"


def test_plain_view_limits_rows_of_steps_but_not_of_epochs():
    clock, stream = Clock(), io.StringIO()
    view = live.make_view("plain", stream, 5, line_seconds=10, clock=clock)
    view.run_started(INFO)
    for step in range(1, 31):
        clock.now += 1
        view.advance(step, step / 10)
        view.step(step_record(step))
        if step % 10 == 0:
            view.epoch(epoch_record(step // 10, 0.5))
    lines = stream.getvalue().splitlines()
    assert lines.count(lines[0]) == 1
    names = [name.strip() for name in lines[0].split("|")]
    columns = [
        "epoch",
        "train loss",
        "train top-1",
        "val loss",
        "val top-1",
        "val top-5",
        "images/s",
        "ETA",
    ]
    assert names == columns
    epochs = [cells(line) for line in lines if re.match(r" +\d/5 \|", line)]
    assert [row[0] for row in epochs] == ["1/5", "2/5", "3/5"]
    steps = [cells(line) for line in lines if re.match(r" +\d\.\d\d/5 \|", line)]
    # At 1 s, then ten seconds after each row.
    assert len(steps) == 3
    assert steps[0] == ["0.10/5", "1.5000", "25.00 %", "", "", "", "100", "0:49"]
    assert epochs[0] == ["1/5", "1.2500", "", "1.0000", "50.00 %", "90.00 %", "100", "0:48"]
    # Each cell is below the name of its column.
    separators = {tuple(match.start() for match in re.finditer(r"\|", line)) for line in lines}
    assert len(separators) == 1


@pytest.mark.parametrize(
    ("columns", "separator"), [(None, " | "), (100, " | "), (93, " | "), (92, "|"), (80, "|")]
)
def test_epoch_table_has_wide_separators_if_lines_have_room(columns, separator):
    header = EpochTable(RunStatus(INFO, 5), columns).header()
    assert f"train loss{separator}train top-1{separator}val loss" in header
    assert columns is None or len(header) <= columns


@pytest.mark.parametrize("epoch", [0.853333, 0.999, 12.5])
def test_plain_view_epoch_within_an_epoch_has_two_digits_at_most(epoch):
    stream = io.StringIO()
    view = live.make_view("plain", stream, 90)
    view.run_started(INFO)
    view.epoch(epoch_record(1, 0.5) | {"epoch": epoch})
    row = stream.getvalue().splitlines()[1]
    assert cells(row)[0] == {0.853333: "0.85/90", 0.999: "1/90", 12.5: "12.5/90"}[epoch]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (754, "12:34"),
        (11220, "3:07:00"),
        (100000, "27:46:40"),
        (200000, "2 d 07 h"),
    ],
)
def test_format_remaining_time(seconds, text):
    assert format_remaining_time(seconds) == text


@pytest.mark.parametrize(
    ("optimizer", "phases"), [("hybrid", 1), ("sgd", 0), ("lars", 0), ("lamb", 0)]
)
def test_plain_view_phase_is_printed_only_for_optimizers_with_several(optimizer, phases):
    stream = io.StringIO()
    view = live.make_view("plain", stream, 5)
    view.run_started({**INFO, "optimizer": optimizer})
    view.epoch(epoch_record(1, 0.5, phase=1.0))
    assert stream.getvalue().count("phase: ") == phases


def test_remaining_time_of_a_session_whose_first_record_is_of_the_compiled_step():
    status = RunStatus(INFO, total_epochs=5)
    compiled = step_record(31, phase=1.0)
    del compiled["images_per_second"]
    status.step(compiled)
    assert status.remaining_seconds() is None
    status.epoch_done(
        epoch_record(4, 0.5, images_per_second=10.0, train_seconds=100.0, train_start_seconds=90.0)
    )
    assert status.remaining_seconds() == pytest.approx(10 + 2)


def test_plain_view_prints_phase_above_trouble_below_and_the_header_after_a_message():
    stream = io.StringIO()
    view = live.make_view("plain", stream, 5)
    view.run_started({**INFO, "num_classes": 3})
    for epoch, phase in ((1, 0), (2, 0), (3, 1)):
        view.epoch(epoch_record(epoch, 0.5, phase=phase))
    view.message("slow disk")
    view.epoch(epoch_record(4, 0.5, phase=1))
    view.epoch(epoch_record(5, 0.5, phase=1, skipped_steps=2))
    lines = [cells(line) for line in stream.getvalue().splitlines()]
    assert [line[0] for line in lines] == [
        *("epoch", "phase: AdaBound", "1/5", "2/5", "phase: SGD", "3/5"),
        *("slow disk", "epoch", "4/5", "5/5", "2 steps skipped"),
    ]
    # With three classes top-5 is meaningless.
    assert "val top-5" not in lines[0]


@pytest.mark.parametrize("mode", ["plain", "none"])
def test_message_escapes_control_characters(mode):
    stream = io.StringIO()
    live.make_view(mode, stream, 5).message("lost a\x1b[2J.jpg\nand b")
    assert stream.getvalue() == "lost a\\x1b[2J.jpg\\nand b\n"


@pytest.mark.parametrize("mode", ["plain", "none", "live"])
def test_message_is_printed_once(mode):
    stream = io.StringIO()
    view = live.make_view(mode, stream, 5)
    view.run_started(INFO)
    for text in ("slow disk", "another message", "slow disk"):
        view.message(text)
    view.run_finished(None)
    assert stream.getvalue().count("slow disk") == stream.getvalue().count("another message") == 1


@pytest.mark.parametrize("columns", ["30", "200"])
def test_status_area_shows_the_values_and_redraws_in_place(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "30")
    clock, stream = Clock(), io.StringIO()
    view = live.make_view("live", stream, 5, clock=clock)
    view.run_started(INFO)
    # The start-up progress is shown while the first step is compiled.
    assert stream.getvalue() == ""
    view.advance(1, 0.1)
    before = len(stream.getvalue())
    view.advance(2, 0.2)
    # It is too early to draw again.
    assert len(stream.getvalue()) == before > 0
    clock.now += 1
    view.step(step_record(5, phase=0.0, lower_bound=0.1, upper_bound=9.5, data_wait_fraction=0.5))
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()[before:])
    for part in ("epoch 1/5", "step 5", "50 %", "100 images/s", "AdaBound", "waiting for"):
        assert part in drawn
    print("from a callback")
    assert "from a callback" in stream.getvalue()
    view.epoch(epoch_record(1, 0.5))
    view.run_finished(
        summary.summarize([epoch_record(1, 0.5)], world_size=4, images_per_epoch=1000)
    )
    assert "did not reach target 75 %" in " ".join(stream.getvalue().split())


def test_live_view_long_command_stays_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    stream = io.StringIO()
    view = live.make_view("live", stream, 5)
    command = f"next: hybrid-imagenet export runs/{'long-' * 20}name --best --to=network.onnx"
    view.run_started(INFO)
    view.advance(1, 0.1)
    view.message(f"{command} 1")
    view.run_finished()
    view.message(f"{command} 2")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert f"{command} 1\n" in shown and f"{command} 2\n" in shown


def test_terminal_size_is_the_one_of_the_launchers_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "51")
    monkeypatch.setenv("LINES", "22")
    master, slave = pty.openpty()
    try:
        monkeypatch.setenv(live.TERMINAL_VARIABLE, f"{socket.gethostname()}:{os.ttyname(slave)}")
        # The terminal does not report its size yet.
        assert live.terminal_size(io.StringIO()) == (80, 24)
        termios.tcsetwinsize(slave, (33, 99))
        assert live.terminal_size(io.StringIO()) == (99, 33)
        monkeypatch.setenv(live.TERMINAL_VARIABLE, "another.host:/dev/pts/0")
        assert live.terminal_size(io.StringIO()) == (51, 22)
    finally:
        os.close(master)
        os.close(slave)
