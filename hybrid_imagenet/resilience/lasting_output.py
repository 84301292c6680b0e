"""Lets a process outlive those who read its output: `| head`, a pager that was left, `tee` after
Ctrl-C, a terminal.
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

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2


class OutputError(UserError):
    """Standard output that does not take the results of a command, such as a file on a full
    disk.
    """


class _Lasting(io.FileIO):
    """A file descriptor for writing that becomes /dev/null when its reader is gone."""

    def __init__(self, number: int, lossy: bool):
        super().__init__(number, "w", closefd=False)
        self._lossy = lossy
        self._has_failed = False

    def write(self, data: Any) -> int:
        """Writes the bytes.

        Raises:
          OutputError: if they cannot be written, once. All that follows is dropped, because Python
            writes what is left in its buffers when the process ends, which must not fail again.
        """
        if self._has_failed:
            return memoryview(data).nbytes
        try:
            while (
                written := super().write(data)
            ) is None:  # another process has made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if self._gone(error):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            elif not self._lossy:
                self._has_failed = True
                raise OutputError(
                    f"Cannot write to standard output: {error.strerror}. Redirect it to another"
                    " place."
                ) from None
            return memoryview(data).nbytes

    def _gone(self, error: OSError) -> bool:
        terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno == errno.EPIPE or (error.errno == errno.EIO and terminal)


def install(*, lossy: bool = False) -> None:
    """Replaces standard output and error by streams that outlive their readers.

    A character that the encoding of a stream does not have is written as an escape sequence.
    Standard error also drops what cannot be written for another reason, such as a full disk,
    because there is no place left to report it.

    Args:
      lossy: standard output drops that too: what the process prints is not its result.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it was closed: it takes the lowest free number, which is its own
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _stream(_STANDARD_OUTPUT, sys.stdout, lossy)
    sys.stderr = _stream(_STANDARD_ERROR, sys.stderr, True)


def _stream(number: int, before: Any, lossy: bool) -> io.TextIOWrapper:
    # Python's own handlers fail: "strict" for any character that the encoding lacks, and
    # "surrogateescape", which the C locale has, for all of them but bytes of file names that are
    # not valid.
    errors = getattr(before, "errors", "strict")
    # Under PYTHONUNBUFFERED the old stream wrote each line at once by write_through alone, because
    # nothing below it had a buffer. The new one has a buffer, so it must also flush at the end of
    # each line.
    write_through = getattr(before, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, lossy)),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="backslashreplace" if errors in ("strict", "surrogateescape") else errors,
        line_buffering=getattr(before, "line_buffering", True) or write_through,
        write_through=write_through,
    )
