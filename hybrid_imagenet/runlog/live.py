"""Shows a run on rank 0: one status area on a terminal, plain lines with a rate limit elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from hybrid_imagenet.errors import printable_lines
from hybrid_imagenet.runlog import summary as summaries
from hybrid_imagenet.runlog.progress import EpochTable, RunStatus, accuracy_texts
from hybrid_imagenet.startup import STARTUP_PROGRESS

if TYPE_CHECKING:
    from rich.console import Group

_REFRESH_SECONDS = 0.25
TERMINAL_VARIABLE = "HYBRID_IMAGENET_TERMINAL"
"""HOST:DEVICE of the terminal that the launcher writes to, 0 if it writes to none."""


def make_view(
    mode: str,
    stream: TextIO,
    total_epochs: float,
    *,
    line_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> PlainView:
    """Makes the view for a mode.

    Args:
      mode: `live` (a status area), `plain` (lines) or `none` (messages only).
      line_seconds: the least time between two lines about steps.
    """
    if mode == "live":
        return LiveView(stream, total_epochs, clock=clock)
    return PlainView(
        stream, total_epochs, line_seconds=line_seconds if mode == "plain" else None, clock=clock
    )


class PlainView:
    """Prints a table with a row per epoch, and one about steps at most every `line_seconds`
    seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        total_epochs: float,
        *,
        line_seconds: float | None,
        clock: Callable[[], float],
    ):
        """`line_seconds` None shows messages only."""
        self._stream = stream
        self._total_epochs = total_epochs
        self._line_seconds = line_seconds
        self._clock = clock
        self._last_line = float("-inf")
        self._told: set[str] = set()
        self._notes: Mapping[str, str] = {}
        self._in_table = False  # its head stands above the rows, again after a message
        self.run_started({})

    def run_started(self, info: Mapping[str, Any]) -> None:
        self._status = RunStatus(info, self._total_epochs)
        self._table = EpochTable(self._status)

    def advance(self, step: int, position: float) -> None:
        self._status.advance(step, position)

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes a row if the last one is old enough."""
        self._status.step(record)
        now = self._clock()
        if self._line_seconds is not None and now - self._last_line >= self._line_seconds:
            self._row_with_notes(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Writes the epoch's row: above it a phase that is new, below it what else is."""
        self._status.epoch_done(record)
        if self._line_seconds is not None:
            self._row_with_notes(record)

    def _row_with_notes(self, record: Mapping[str, Any]) -> None:
        self._head()
        before, after = self._status.notes_before(), self._status.notes_after()
        self._new_notes(before)
        self._row(record)
        self._new_notes(after)
        self._notes = {**before, **after}

    def _head(self) -> None:
        if not self._in_table:
            self._write(self._table.head())
        self._in_table = True

    def _row(self, record: Mapping[str, Any]) -> None:
        self._last_line = self._clock()
        self._head()
        self._write(self._table.row(record))

    def _new_notes(self, notes: Mapping[str, str]) -> None:
        for name, note in notes.items():
            if note != self._notes.get(name):
                self._write(f"{'':9} {note}")

    def message(self, text: str) -> None:
        """Writes the message unless it was written before; it may quote the names of files."""
        if text not in self._told:
            self._told.add(text)
            self._in_table = False
            self._write(printable_lines(text), "yellow")

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Writes the summary, if there is one."""
        if summary is not None and self._line_seconds is not None:
            for line in summaries.summary_lines(summary):
                self._write(line)

    def _write(self, line: str, style: str = "") -> None:
        with STARTUP_PROGRESS.hidden():
            self._stream.write(line + "\n")
            self._stream.flush()


def _or_default(found: tuple[int, int]) -> tuple[int, int]:
    """Returns 80 columns and 24 lines for what a terminal does not tell: it has 0 of them then."""
    return found[0] or 80, found[1] or 24


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Returns columns and lines of the launcher's terminal where it told its own, else of the
    stream's.
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


class LiveView(PlainView):
    """Shows two bars and a few values, redrawn in place at most four times a second, in the
    caller's thread.
    """

    def __init__(self, stream: TextIO, total_epochs: float, *, clock: Callable[[], float]):
        # rich takes a tenth of a second to import, which a run without a terminal need not wait
        # for.
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._last_drawn = float("-inf")
        super().__init__(stream, total_epochs, line_seconds=0.0, clock=clock)
        self._open = False

    def run_started(self, info: Mapping[str, Any]) -> None:
        """Opens the status area with the first step; what others print appears above it then."""
        super().run_started(info)
        self._in_table = False
        self._open = True

    def advance(self, step: int, position: float) -> None:
        super().advance(step, position)
        self._draw()

    def step(self, record: Mapping[str, Any]) -> None:
        self._status.step(record)
        self._draw()

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Takes an epoch record and leaves its row above the area."""
        self._status.epoch_done(record)
        self._row(record)
        self._draw(now=True)

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Removes the area and prints the summary."""
        self._live.stop()
        self._open = False
        super().run_finished(summary)

    def _write(self, line: str, style: str = "") -> None:
        from rich.text import Text

        with STARTUP_PROGRESS.hidden():
            self._console.size = terminal_size(self._stream)
            # Wrapped by the terminal alone: it copies a command as one line, which a newline in the
            # middle would cut.
            self._console.print(Text(line, style=style), soft_wrap=True)

    def _draw(self, *, now: bool = False) -> None:
        if not self._open or (not now and self._clock() - self._last_drawn < _REFRESH_SECONDS):
            return
        self._last_drawn = self._clock()
        self._console.size = terminal_size(self._stream)
        if not self._live.is_started:
            self._live.start()  # what others print appears above the area from here on
        self._live.update(self._area(), refresh=True)

    def _area(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status = self._status
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        left = status.remaining_seconds()
        bars.add_row(
            f"epoch {status.epoch}/{summaries.format_epochs(self._total_epochs)}",
            ProgressBar(total=status.ends_at, completed=status.position),
            "" if left is None else f"{summaries.format_duration(left)} left",
        )
        bars.add_row(
            f"step {status.steps_done}",
            ProgressBar(total=1.0, completed=status.epoch_fraction),
            f"{100 * status.epoch_fraction:.0f} %",
        )
        values = Table.grid(padding=(0, 2))
        values.add_column(style="dim", no_wrap=True)
        values.add_column()
        for name, text in self._rows():
            values.add_row(name, Text(text, style="red" if name == "trouble" else ""))
        return Group(bars, values)

    def _rows(self) -> list[tuple[str, str]]:
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
