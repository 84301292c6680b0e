"""Shows a run in a status area on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid_imagenet.runlog import summary as summaries
from hybrid_imagenet.runlog.area import Area
from hybrid_imagenet.runlog.messages import Messages
from hybrid_imagenet.runlog.progress import Status, accuracies
from hybrid_imagenet.stages import START

_REFRESH_SECONDS = 0.25


class LiveView:
    """Shows two bars and a few values, redrawn in place at most four times a second, in the caller's thread."""

    def __init__(self, stream: TextIO, total_epochs: float, *, clock: Callable[[], float]):
        self._screen = Area(stream)
        self._total_epochs = total_epochs
        self._clock = clock
        self._last_drawn = float("-inf")
        self._messages = Messages()
        self._status = Status({}, total_epochs)
        self._open = False

    def run_started(self, info: Mapping[str, Any]) -> None:
        """Opens the status area with the first step; what others print appears above it then."""
        self._status = Status(info, self._total_epochs)
        self._open = True

    def advance(self, step: int, position: float | None = None) -> None:
        """Moves the bars."""
        self._status.advance(step, position)
        self._draw()

    def step(self, record: Mapping[str, Any]) -> None:
        """Takes a step record."""
        self._status.step(record)
        self._draw()

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Takes an epoch record and leaves one line about it above the area."""
        self._status.epoch_done(record)
        parts = [f"epoch {record['epoch']:>3g}"]
        parts += [f"{word} {text}" for word, text in accuracies(record)]
        parts += [self._status.rate_text() or ""]
        self._screen.print(Text("  ".join(part for part in parts if part)))
        self._draw(now=True)

    def message(self, text: str, rank: int | None = None) -> None:
        """Prints the message above the area unless it was printed before."""
        line = self._messages.line(text, rank)
        if line is not None:
            with START.quiet():
                self._screen.print(Text(line, style="yellow"))

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        """Removes the area and prints the summary."""
        self._screen.close()
        self._open = False
        for line in self._messages.repeated():
            self._screen.print(Text(line, style="yellow"))
        if summary is not None:
            for line in summaries.lines(summary):
                self._screen.print(Text(line))

    def _draw(self, *, now: bool = False) -> None:
        if not self._open or (not now and self._clock() - self._last_drawn < _REFRESH_SECONDS):
            return
        self._last_drawn = self._clock()
        self._screen.draw(self._area())

    def _area(self) -> Group:
        status = self._status
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        bars.add_column(justify="right", no_wrap=True)
        left = status.remaining_seconds()
        bars.add_row(
            f"epoch {status.epoch}/{self._total_epochs:g}",
            ProgressBar(total=status.ends_at, completed=status.position),
            "" if left is None else f"{summaries.duration(left)} left",
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
        train = ", ".join(f"{word} {text}" for word, text in accuracies(status.values, ("train",)))
        validation = ", ".join(f"{word} {text}" for word, text in accuracies(status.values, ("val",)))
        rows = [
            ("training", train),
            ("validation", validation),
            ("speed", status.rate_text()),
            ("phase", status.phase_text()),
            ("target", status.target_text()),
            ("reference", status.reference_text()),
            ("trouble", status.trouble_text()),
        ]
        return [(name, text) for name, text in rows if text]
