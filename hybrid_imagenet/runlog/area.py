"""Draws a few lines at the bottom of a terminal, again and again in place, whatever size it takes meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment

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


class Area(RenderHook):
    """Keeps lines below everything that is printed through `console`, standard output or standard error.

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
