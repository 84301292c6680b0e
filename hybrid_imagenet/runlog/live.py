"""Shows a run on rank 0: one status area on a terminal, plain lines with a rate limit elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from hybrid_imagenet.runlog import summary as summaries
from hybrid_imagenet.runlog.progress import EpochTable, Messages, Status
from hybrid_imagenet.stages import START

MODES = ("auto", "live", "plain", "none")


class View(Protocol):
    """The interface of every view."""

    def run_started(self, info: Mapping[str, Any]) -> None:
        """Begins; `info` as in `progress.Status`."""

    def advance(self, step: int, position: float | None = None) -> None:
        """Notes a finished step (since the start of the run) and the fractional epochs done."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Takes a step record."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Takes an epoch record."""

    def message(self, text: str, rank: int | None = None) -> None:
        """Shows a message once, with the rank that sent it if it is not this one."""

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Ends; shows the summary (see `runlog.summary.summarize`) if there is one."""


def make_view(
    mode: str,
    stream: TextIO,
    total_epochs: float,
    *,
    line_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """Makes the view for a mode.

    Args:
      mode: `live` (a status area), `plain` (lines), `none` (messages only), or `auto`: live on a terminal.
      stream: where to write.
      total_epochs: planned.
      line_seconds: the least time between two lines about steps.
      clock: seconds.

    Raises:
      ValueError: for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"view {mode!r}: must be one of {', '.join(MODES)}")
    if mode == "auto":
        mode = "live" if _is_terminal(stream) else "plain"
    if mode == "live":
        # rich takes a tenth of a second to import, which a run without a terminal need not wait for.
        from hybrid_imagenet.runlog.live_rich import LiveView

        return LiveView(stream, total_epochs, clock=clock)
    return PlainView(stream, total_epochs, line_seconds=line_seconds if mode == "plain" else None, clock=clock)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class PlainView:
    """Prints a table with a row per epoch, and one about steps at most every `line_seconds` seconds."""

    def __init__(self, stream: TextIO, total_epochs: float, *, line_seconds: float | None, clock: Callable[[], float]):
        """`line_seconds` None shows messages only."""
        self._stream = stream
        self._total_epochs = total_epochs
        self._line_seconds = line_seconds
        self._clock = clock
        self._last_line = float("-inf")
        self._messages = Messages()
        self._notes: Mapping[str, str] = {}
        self._in_table = False  # its head stands above the rows, again after a message
        self.run_started({})

    def run_started(self, info: Mapping[str, Any]) -> None:
        """Begins."""
        self._status = Status(info, self._total_epochs)
        self._table = EpochTable(self._status)

    def advance(self, step: int, position: float | None = None) -> None:
        """Notes a finished step."""
        self._status.advance(step, position)

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes a row if the last one is old enough."""
        self._status.step(record)
        now = self._clock()
        if self._line_seconds is not None and now - self._last_line >= self._line_seconds:
            self._row(record)
            self._new_notes()

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Writes the epoch's row, and below it what is new."""
        self._status.epoch_done(record)
        if self._line_seconds is not None:
            self._row(record)
            self._new_notes()

    def _row(self, record: Mapping[str, Any]) -> None:
        self._last_line = self._clock()
        if not self._in_table:
            self._write(self._table.head())
        self._in_table = True
        self._write(self._table.row(record))

    def _new_notes(self) -> None:
        for name, note in self._status.notes().items():
            if note != self._notes.get(name):
                self._write(f"{'':10} {note}")
        self._notes = self._status.notes()

    def message(self, text: str, rank: int | None = None) -> None:
        """Writes the message unless it was written before."""
        line = self._messages.line(text, rank)
        if line is not None:
            self._in_table = False
            self._write(line, "yellow")

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Writes who else sent a message, and the summary."""
        for line in self._messages.repeated():
            self._write(line, "yellow")
        if summary is not None and self._line_seconds is not None:
            for line in summaries.lines(summary):
                self._write(line)

    def _write(self, line: str, style: str = "") -> None:
        with START.quiet():
            self._stream.write(line + "\n")
            self._stream.flush()
