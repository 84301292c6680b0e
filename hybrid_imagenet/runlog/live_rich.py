"""Shows a run in a status area on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from hybrid_imagenet.runlog import summary as summaries
from hybrid_imagenet.runlog.progress import EpochTable, Messages, Status, accuracies
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


class LiveView:
    """Shows two bars and a few values, redrawn in place at most four times a second, in the caller's thread."""

    def __init__(self, stream: TextIO, total_epochs: float, *, clock: Callable[[], float]):
        self._screen = Area(stream)
        self._total_epochs = total_epochs
        self._clock = clock
        self._last_drawn = float("-inf")
        self._messages = Messages()
        self._status = Status({}, total_epochs)
        self._open = self._in_table = False

    def run_started(self, info: Mapping[str, Any]) -> None:
        """Opens the status area with the first step; what others print appears above it then."""
        self._status = Status(info, self._total_epochs)
        self._table = EpochTable(self._status)
        self._in_table = False  # its head stands above the rows, again after a message
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
        """Takes an epoch record and leaves its row above the area."""
        self._status.epoch_done(record)
        if not self._in_table:
            self._screen.print(Text(self._table.head()))
        self._in_table = True
        self._screen.print(Text(self._table.row(record)))
        self._draw(now=True)

    def message(self, text: str, rank: int | None = None) -> None:
        """Prints the message above the area unless it was printed before."""
        line = self._messages.line(text, rank)
        if line is not None:
            self._in_table = False
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
        train = ", ".join(f"{word} {text}" for word, text in accuracies(status.values, "train"))
        validation = ", ".join(f"{word} {text}" for word, text in accuracies(status.values, "val", top5=status.top5))
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


class Area(RenderHook):
    """Keeps lines at the bottom of a terminal, drawn in place whatever size it takes meanwhile,
    below everything that is printed through `console`, standard output or standard error.

    Attributes:
      console: prints above the lines.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.console = Console(file=stream, force_terminal=True, highlight=False)
        self._content: RenderableType | None = None
        self._widths: list[int] = []  # cells of the lines that stand on the terminal
        self._before: tuple[TextIO, TextIO] | None = None
        self._fit()

    def draw(self, content: RenderableType) -> None:
        """Shows the content in place of what was shown."""
        if self._before is None:
            self._before = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = (cast(TextIO, FileProxy(self.console, file)) for file in self._before)
            self.console.push_render_hook(self)
            self.console.show_cursor(False)
        self._content = content
        self.print()

    def print(self, *above: RenderableType) -> None:
        """Prints above the lines, and draws these anew."""
        self._fit()
        self.console.print(*(above or (Control(),)))

    def close(self) -> None:
        if self._before is None:
            return
        self._content = None
        self.print()
        self.console.pop_render_hook()
        self.console.show_cursor(True)
        sys.stdout, sys.stderr = self._before
        self._before = None

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Puts what is printed in the place of the lines, and the lines below it."""
        return [self._erase(), *renderables, _Lines(self._content, self._widths)]

    def _fit(self) -> None:
        self.console.size = size(self._stream)

    def _erase(self) -> Control:
        """Erases the lines from the last, where the cursor stands, upwards.

        A terminal that has become narrower has broken each line that does not fit into several.
        """
        columns, height = self.console.size
        rows = min(sum(max(1, -(-width // columns)) for width in self._widths), height)
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
        return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *(up * max(rows - 1, 0)))


class _Lines:
    """Renders the content without a line break at its end, and notes the widths of its lines."""

    def __init__(self, content: RenderableType | None, widths: list[int]):
        self._content = content
        self._widths = widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        self._widths.clear()
        if self._content is None:
            return
        lines = console.render_lines(self._content, options.update(height=None), pad=False)[: console.size.height - 1]
        self._widths += [_cells(line) for line in lines]
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line


def _cells(line: Iterable[Segment]) -> int:
    return sum(cell_len(segment.text) for segment in line if not segment.control)
