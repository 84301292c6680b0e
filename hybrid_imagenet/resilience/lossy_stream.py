"""Lets a process continue after the readers of its output have ended.

Examples are `| head`, a pager that the user has left, `tee` after Ctrl-C, or a closed terminal.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from typing import Any

from hybrid_imagenet.errors import UserError

_STANDARD_OUTPUT = 1
_STANDARD_ERROR = 2


class OutputError(UserError):
    """Raised if standard output does not take a command's results.

    An example is a file on a full disk.
    """


def install(*, ignore_write_errors: bool = False) -> None:
    """Replaces standard output and error by streams that outlive their readers.

    A character that the encoding of a stream does not have is written as an escape sequence.
    Standard error also drops what cannot be written for another reason, such as a full disk,
    because no other stream is left on which the error could be reported.

    Args:
      ignore_write_errors: Drop such output of standard output too, because the process does not
        print its results.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The descriptor was closed, and `open` returns the lowest free one, so it is this one.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _text_stream(_STANDARD_OUTPUT, sys.stdout, ignore_write_errors)
    sys.stderr = _text_stream(_STANDARD_ERROR, sys.stderr, True)


class LossyStream(io.FileIO):
    """Writes to a file descriptor, and to /dev/null once its reader has ended."""

    def __init__(self, number: int, ignore_write_errors: bool):
        super().__init__(number, "w", closefd=False)
        self._ignore_write_errors = ignore_write_errors
        self._has_failed = False

    def write(self, data: Any) -> int:
        """Writes bytes and returns their number.

        Raises:
          OutputError: If the bytes cannot be written, once. All later output is dropped, because
            Python writes the rest of its buffers when the process ends, which must not fail again.
        """
        if self._has_failed:
            return memoryview(data).nbytes
        try:
            # Another process may have made the descriptor non-blocking. Then `write` returns None
            # while it takes nothing.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            if self._reader_has_ended(error):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            elif not self._ignore_write_errors:
                self._has_failed = True
                raise OutputError(
                    f"Cannot write to standard output: {error.strerror}. Redirect it to another"
                    " place."
                ) from None
            return memoryview(data).nbytes

    def _reader_has_ended(self, error: OSError) -> bool:
        is_terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno == errno.EPIPE or (error.errno == errno.EIO and is_terminal)


def _text_stream(number: int, replaced: Any, ignore_write_errors: bool) -> io.TextIOWrapper:
    """Returns a stream like the replaced one, which may be None."""
    # Python's default handlers fail: "strict" for any character that the encoding lacks, and
    # "surrogateescape", which the C locale has, for all of them but invalid bytes of file names.
    errors = getattr(replaced, "errors", "strict")
    if errors in ("strict", "surrogateescape"):
        errors = "backslashreplace"
    # Under PYTHONUNBUFFERED the old stream wrote each line at once by write_through alone, because
    # nothing below it had a buffer. The new one has a buffer, so it must also flush at the end of
    # each line.
    write_through = getattr(replaced, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(LossyStream(number, ignore_write_errors)),
        encoding=getattr(replaced, "encoding", "utf-8"),
        errors=errors,
        line_buffering=getattr(replaced, "line_buffering", True) or write_through,
        write_through=write_through,
    )
