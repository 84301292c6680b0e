"""Shows a run on rank 0.

On a terminal it is a status area, elsewhere lines with a rate limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from hybrid_imagenet.errors import printable
from hybrid_imagenet.runlog import summary as summaries
from hybrid_imagenet.runlog.progress import EpochTable, RunStatus, accuracy_texts
from hybrid_imagenet.startup import STARTUP_PROGRESS

if TYPE_CHECKING:
    from rich.console import Group

_REFRESH_SECONDS = 0.25
# Size of a terminal that does not report its size, for which the system returns 0.
_DEFAULT_COLUMNS = 80
_DEFAULT_LINES = 24
TERMINAL_VARIABLE = "HYBRID_IMAGENET_TERMINAL"
"""Environment variable with HOST:DEVICE of the launcher's terminal, or 0 without a terminal."""


def make_view(
    mode: str,
    stream: TextIO,
    total_epochs: float,
    *,
    line_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> PlainView:
    """Returns the view for a mode.

    Args:
      mode: `live` (a status area), `plain` (lines) or `none` (messages only).
      stream: Stream to which the view writes.
      total_epochs: Planned number of epochs.
      line_seconds: Minimum seconds between two lines about steps.
      clock: Returns the time in seconds.
    """
    if mode == "live":
        return LiveView(stream, total_epochs, clock=clock)
    return PlainView(
        stream, total_epochs, line_seconds=line_seconds if mode == "plain" else None, clock=clock
    )


class PlainView:
    """Prints a table with a row for each epoch, and rows for steps with a rate limit."""

    def __init__(
        self,
        stream: TextIO,
        total_epochs: float,
        *,
        line_seconds: float | None,
        clock: Callable[[], float],
    ):
        """Opens the view.

        Args:
          stream: Stream to which the view writes.
          total_epochs: Planned number of epochs.
          line_seconds: Minimum seconds between two rows about steps; None shows messages only.
          clock: Returns the time in seconds.
        """
        self._stream = stream
        self._total_epochs = total_epochs
        self._line_seconds = line_seconds
        self._clock = clock
        self._last_row_time = float("-inf")
        self._printed_messages: set[str] = set()
        self._notes: Mapping[str, str] = {}
        # Whether the last line belongs to the table. After a message the header is printed again.
        self._in_table = False
        self.run_started({})

    def run_started(self, info: Mapping[str, Any]) -> None:
        self._status = RunStatus(info, self._total_epochs)
        self._table = EpochTable(self._status, self._max_width())

    def _max_width(self) -> int | None:
        """Returns the characters of a line; None if no terminal would wrap it."""
        return None

    def advance(self, step: int, position: float) -> None:
        self._status.advance(step, position)

    def step(self, record: Mapping[str, Any]) -> None:
        """Prints a row, unless the last one is too recent."""
        self._status.step(record)
        if self._line_seconds is None:
            return
        if self._clock() - self._last_row_time >= self._line_seconds:
            self._print_row_with_notes(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Prints the row of an epoch; a new phase is above it, other new notes are below it."""
        self._status.epoch_done(record)
        if self._line_seconds is not None:
            self._print_row_with_notes(record)

    def _print_row_with_notes(self, record: Mapping[str, Any]) -> None:
        self._print_header()
        before = self._status.notes_before()
        after = self._status.notes_after()
        self._print_new_notes(before)
        self._print_row(record)
        self._print_new_notes(after)
        self._notes = {**before, **after}

    def _print_header(self) -> None:
        if not self._in_table:
            self._write(self._table.header())
        self._in_table = True

    def _print_row(self, record: Mapping[str, Any]) -> None:
        self._last_row_time = self._clock()
        self._print_header()
        self._write(self._table.row(record))

    def _print_new_notes(self, notes: Mapping[str, str]) -> None:
        for name, note in notes.items():
            if note != self._notes.get(name):
                self._write(f"{'':9} {note}")

    def message(self, text: str) -> None:
        """Prints a message, unless the same one was printed before.

        It is made printable, because it may quote file names.
        """
        if text not in self._printed_messages:
            self._printed_messages.add(text)
            self._in_table = False
            self._write(printable(text), "yellow")

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Prints the summary, if there is one."""
        if summary is not None and self._line_seconds is not None:
            for line in summaries.summary_lines(summary):
                self._write(line)

    def _write(self, line: str, style: str = "") -> None:
        with STARTUP_PROGRESS.hidden():
            self._stream.write(line + "\n")
            self._stream.flush()


class LiveView(PlainView):
    """Shows two progress bars and a few values in a status area.

    It is redrawn at most four times a second, in the caller's thread.
    """

    def __init__(self, stream: TextIO, total_epochs: float, *, clock: Callable[[], float]):
        # Importing rich takes a tenth of a second. A run without a terminal does not need it.
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._last_draw_time = float("-inf")
        super().__init__(stream, total_epochs, line_seconds=0.0, clock=clock)
        self._open = False

    def _max_width(self) -> int | None:
        return terminal_size(self._stream)[0]

    def run_started(self, info: Mapping[str, Any]) -> None:
        """Opens the status area at the first step; from then on, other output is above it."""
        super().run_started(info)
        self._in_table = False
        self._open = True

    def advance(self, step: int, position: float) -> None:
        super().advance(step, position)
        self._draw_if_due()

    def step(self, record: Mapping[str, Any]) -> None:
        self._status.step(record)
        self._draw_if_due()

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Shows an epoch record, and prints its row above the status area."""
        self._status.epoch_done(record)
        self._print_row(record)
        self._draw()

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Removes the status area and prints the summary."""
        self._live.stop()
        self._open = False
        super().run_finished(summary)

    def _write(self, line: str, style: str = "") -> None:
        from rich.text import Text

        with STARTUP_PROGRESS.hidden():
            self._console.size = terminal_size(self._stream)
            # Only the terminal wraps long lines, so that a command can be copied as one line.
            self._console.print(Text(line, style=style), soft_wrap=True)

    def _draw_if_due(self) -> None:
        if self._clock() - self._last_draw_time >= _REFRESH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        if not self._open:
            return
        self._last_draw_time = self._clock()
        self._console.size = terminal_size(self._stream)
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._status_area(), refresh=True)

    def _status_area(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status = self._status
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        remaining = status.remaining_seconds()
        bars.add_row(
            f"epoch {status.epoch}/{summaries.format_epochs(self._total_epochs)}",
            ProgressBar(total=status.ends_at, completed=status.position),
            "" if remaining is None else f"{summaries.format_duration(remaining)} left",
        )
        bars.add_row(
            f"step {status.steps_done}",
            ProgressBar(total=1.0, completed=status.epoch_fraction),
            f"{100 * status.epoch_fraction:.0f} %",
        )
        values = Table.grid(padding=(0, 2))
        values.add_column(style="dim", no_wrap=True)
        values.add_column()
        for name, text in self._value_rows():
            values.add_row(name, Text(text, style="red" if name == "trouble" else ""))
        return Group(bars, values)

    def _value_rows(self) -> list[tuple[str, str]]:
        status = self._status
        train = ", ".join(f"{word} {text}" for word, text in accuracy_texts(status.values, "train"))
        validation = ", ".join(
            f"{word} {text}"
            for word, text in accuracy_texts(status.values, "val", top5=status.top5)
        )
        rows = [
            ("training", train),
            ("validation", validation),
            ("speed", status.rate_text()),
            ("update", status.phase_text()),
            ("target", status.target_text()),
            ("trouble", status.trouble_text()),
        ]
        return [(name, text) for name, text in rows if text]


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Returns columns and lines of a terminal.

    It is the launcher's terminal if the launcher reported one of this host, else the one of
    `stream`.
    """
    host, _, device = os.environ.get(TERMINAL_VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if device and host == socket.gethostname():
            descriptor = os.open(device, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                return _or_default(os.get_terminal_size(descriptor))
            finally:
                os.close(descriptor)
        return _or_default(os.get_terminal_size(stream.fileno()))
    return shutil.get_terminal_size()


def _or_default(size: tuple[int, int]) -> tuple[int, int]:
    columns, lines = size
    return columns or _DEFAULT_COLUMNS, lines or _DEFAULT_LINES
