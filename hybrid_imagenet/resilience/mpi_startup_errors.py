"""Turns what Open MPI prints when it cannot start, 9 to 20 raw lines, into one line."""

from __future__ import annotations

import re

from hybrid_imagenet.errors import printable

# The first words of blocks of text that Open MPI prints between two lines of dashes.
BLOCK_BEGINNINGS = (
    b"A call to mkdir was unable to create the desired directory",
    b"It looks like orte_init failed",
    b"It looks like MPI_INIT failed",
    b"No network interfaces were found for out-of-band communications",
    b"None of the TCP networks specified to be included",
    b"Sorry!  You were supposed to get help about:",
)
# A message begins with "[host:process] ", and a daemon's also with "[[job,step],number] ".
_ERROR_LINE = re.compile(
    rb"\[\S+:\d+\] (?:\[\[\d+,\d+\],\d+\] )?"
    rb"(?:(?:PMIX|OPAL|ORTE) ERROR: |ORTE_ERROR_LOG: |opal_ifinit: |pmix_ifinit: |ptl_tcp:"
    rb" |oob_tcp: "
    rb"|Local abort before MPI_INIT )(?P<reason>.*)"
    rb"|\*\*\* (?:An error occurred in MPI_Init|on a NULL communicator|MPI_ERRORS_ARE_FATAL|   and"
    rb" potentially your)"
)
_FATAL = re.compile(
    rb"Local abort before MPI_INIT|orte_init failed|MPI_INIT failed|No network interfaces were"
    rb" found"
    rb"|listener-thread-start"
)
_MAX_REASON_LENGTH = 160


class MpiStartupErrors:
    """Keeps Open MPI's errors until it is clear whether the job starts in spite of them.

    Attributes:
      are_fatal: Whether one says that Open MPI, or a rank's part of it, cannot start.
    """

    def __init__(self) -> None:
        self.are_fatal = False
        self._lines: list[bytes] = []
        self._line_reason = ""
        self._block: list[str] = []
        self._is_first_block = True

    def keep_line(self, line: bytes) -> bool:
        """Keeps a line if it is an error of Open MPI; returns whether it is.

        Args:
          line: A line of standard error without the tag of its rank.
        """
        match = _ERROR_LINE.match(line)
        if match is None:
            return False
        self._append(line)
        reason = (match["reason"] or b"").decode(errors="replace")
        self._line_reason = self._line_reason or reason.partition(" in file ")[0].strip()
        return True

    def begin_block(self, rule: bytes, line: bytes) -> None:
        """Keeps the first line of a block, and the line of dashes above it."""
        self._lines.append(rule)
        self.keep_block_line(line, is_rule=False)

    def keep_block_line(self, line: bytes, *, is_rule: bool) -> None:
        """Keeps another line of a block, or the line of dashes that ends it (`is_rule`)."""
        self._append(line)
        if is_rule:
            self._is_first_block = False
        elif self._is_first_block:
            self._block.append(line.decode(errors="replace").strip())

    def summary(self) -> str:
        """Returns one line for the user, or "" if Open MPI has reported no error."""
        if not self._lines:
            return ""
        block = " ".join(line for line in self._block if line)
        reason = (block or self._line_reason)[:_MAX_REASON_LENGTH].rstrip(". ")
        shown_reason = f" ({printable(reason)})" if reason else ""
        return (
            f"error: Open MPI could not start the ranks{shown_reason}. Check the limits (ulimit"
            " -a), the network interfaces (ip link) and the space in TMPDIR on each host, or run"
            " hybrid-imagenet doctor."
        )

    def raw_lines(self) -> bytes:
        """Returns the errors as Open MPI printed them, for a job that started nevertheless."""
        return b"".join(self._lines)

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self.are_fatal = self.are_fatal or bool(_FATAL.search(line))
