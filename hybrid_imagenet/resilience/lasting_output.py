"""Lets a process outlive those who read its output: `| head`, a pager that was left, `tee` after Ctrl-C, a terminal."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from typing import Any


class _Lasting(io.FileIO):
    """A file descriptor for writing that becomes /dev/null when its reader is gone."""

    def __init__(self, number: int, lossy: bool):
        super().__init__(number, "w", closefd=False)
        self._lossy = lossy

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # another process has made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if self._gone(error):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            elif not self._lossy:
                raise
            return memoryview(data).nbytes

    def _gone(self, error: OSError) -> bool:
        terminal = stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
        return error.errno == errno.EPIPE or (error.errno == errno.EIO and terminal)


def install(*, lossy: bool = False) -> None:
    """Replaces standard output and error by streams that outlive their readers.

    Args:
      lossy: also drop what cannot be written for another reason, such as a full disk: the output is no result.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it was closed: it takes the lowest free number, which is its own
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _stream(1, sys.stdout, lossy), _stream(2, sys.stderr, lossy)


def _stream(number: int, before: Any, lossy: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, lossy)),
        encoding=getattr(before, "encoding", "utf-8"),
        errors=getattr(before, "errors", "strict").replace("strict", "backslashreplace"),
        line_buffering=getattr(before, "line_buffering", True),
        write_through=getattr(before, "write_through", False),
    )
