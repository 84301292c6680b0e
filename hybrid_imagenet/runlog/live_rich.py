"""Shows a run in a status area on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybrid_imagenet.runlog import summary as summaries
from hybrid_imagenet.runlog.live import PlainView
from hybrid_imagenet.runlog.progress import accuracies
from hybrid_imagenet.stages import START

_REFRESH_SECONDS = 0.25
VARIABLE = "HYBRID_IMAGENET_TERMINAL"
"""HOST:DEVICE of the terminal that the launcher writes to, 0 if it writes to none."""


def size(stream: TextIO) -> tuple[int, int]:
    """Returns columns and lines of the launcher's terminal where it told its own, else of the stream's."""
    host, _, device = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if device and host == socket.gethostname():
            descriptor = os.open(device, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                return os.get_terminal_size(descriptor)
            finally:
                os.close(descriptor)
        return os.get_terminal_size(stream.fileno())
    return shutil.get_terminal_size()


class LiveView(PlainView):
    """Shows two bars and a few values, redrawn in place at most four times a second, in the caller's thread."""

    def __init__(self, stream: TextIO, total_epochs: float, *, clock: Callable[[], float]):
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

    def advance(self, step: int, position: float | None = None) -> None:
        """Moves the bars."""
        super().advance(step, position)
        self._draw()

    def step(self, record: Mapping[str, Any]) -> None:
        """Takes a step record."""
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
        with START.quiet():
            self._console.size = size(self._stream)
            self._console.print(Text(line, style=style))

    def _draw(self, *, now: bool = False) -> None:
        if not self._open or (not now and self._clock() - self._last_drawn < _REFRESH_SECONDS):
            return
        self._last_drawn = self._clock()
        self._console.size = size(self._stream)
        if not self._live.is_started:
            self._live.start()  # what others print appears above the area from here on
        self._live.update(self._area(), refresh=True)

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
        train = ", ".join(f"{word} {text}" for word, text in accuracies(status.values, "train"))
        validation = ", ".join(f"{word} {text}" for word, text in accuracies(status.values, "val", top5=status.top5))
        rows = [
            ("training", train),
            ("validation", validation),
            ("speed", status.rate_text()),
            ("phase", status.phase_text()),
            ("target", status.target_text()),
            ("trouble", status.trouble_text()),
        ]
        return [(name, text) for name, text in rows if text]
