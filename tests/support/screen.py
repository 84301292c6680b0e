"""What a terminal shows after the bytes that a program wrote: as much of one as the program needs, with line breaks.

A terminal that becomes narrower breaks the lines that no longer fit, and joins them again when it becomes wider, as
tmux, GNOME's and most others do.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """All lines that a terminal of some width has, those that have scrolled away too.

    Attributes:
      columns: its width.
    """

    def __init__(self, columns: int):
        self.columns = columns
        self._rows: list[tuple[str, bool]] = [("", False)]  # text, and whether it goes on in the next row
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Takes what a program wrote.

        Raises:
          AssertionError: for a command that is not known here.
        """
        end = 0
        for token in _TOKEN.finditer(text):
            assert token.start() == end, f"not understood: {text[end : end + 20]!r}"
            end = token.end()
            numbers, command, carriage_return, line_feed, written = token.groups()
            if carriage_return:
                self._column = 0
            elif line_feed:
                self._down()
            elif written:
                self._write(written)
            else:
                self._command(command, numbers)
        assert end == len(text), f"not understood: {text[end : end + 20]!r}"

    def resize(self, columns: int) -> None:
        """Breaks and joins lines; the cursor stays at its character."""
        lines, line, cursor = [], "", (0, 0)
        for number, (text, goes_on) in enumerate(self._rows):
            if number == self._row:
                cursor = len(lines), len(line) + self._column
            line += text
            if not goes_on:
                lines.append(line)
                line = ""
        self.columns, self._rows = columns, []
        for number, whole in enumerate(lines):
            parts = [whole[at : at + columns] for at in range(0, max(len(whole), 1), columns)]
            if number == cursor[0]:
                row = min(cursor[1] // columns, len(parts) - 1)
                self._row, self._column = len(self._rows) + row, cursor[1] - row * columns
            self._rows += [(part, part is not parts[-1]) for part in parts]

    def lines(self) -> list[str]:
        """Returns the rows, without blanks at their ends and empty ones at the end of all."""
        rows = [text.rstrip() for text, _ in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _write(self, text: str) -> None:
        for character in text:
            if self._column == self.columns:
                self._rows[self._row] = (self._rows[self._row][0], True)
                self._down()
                self._column = 0
            row, goes_on = self._rows[self._row]
            row = row.ljust(self._column)
            self._rows[self._row] = (row[: self._column] + character + row[self._column + 1 :], goes_on)
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(("", False))

    def _command(self, command: str, numbers: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif command == "K":
            row, _ = self._rows[self._row]
            self._rows[self._row] = ("" if numbers == "2" else row[: self._column], False)
            if numbers == "2" and self._row and self._rows[self._row - 1][1]:
                self._rows[self._row - 1] = (self._rows[self._row - 1][0], False)
        else:
            assert command in "mhl", f"command {command!r} is not known here"
