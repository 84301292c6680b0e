"""Collects what Open MPI writes when it cannot begin: 9 to 20 raw lines, of which one line is
made.
"""

from __future__ import annotations

import re

from hybrid_imagenet.errors import printable

# "[host:process] " and, from a daemon, its "[[job,step],number] " come before a message.
_LINE = re.compile(
    rb"\[\S+:\d+\] (?:\[\[\d+,\d+\],\d+\] )?"
    rb"(?:(?:PMIX|OPAL|ORTE) ERROR: |ORTE_ERROR_LOG: |opal_ifinit: |pmix_ifinit: |ptl_tcp:"
    rb" |oob_tcp: "
    rb"|Local abort before MPI_INIT )(?P<reason>.*)"
    rb"|\*\*\* (?:An error occurred in MPI_Init|on a NULL communicator|MPI_ERRORS_ARE_FATAL|   and"
    rb" potentially your)"
)
BEGINNINGS = (
    b"A call to mkdir was unable to create the desired directory",
    b"It looks like orte_init failed",
    b"It looks like MPI_INIT failed",
    b"No network interfaces were found for out-of-band communications",
    b"None of the TCP networks specified to be included",
    b"Sorry!  You were supposed to get help about:",
)
"""How the blocks of text begin that Open MPI writes between two rules."""
_FATAL = re.compile(
    rb"Local abort before MPI_INIT|orte_init failed|MPI_INIT failed|No network interfaces were"
    rb" found"
    rb"|listener-thread-start"
)
_MAX_REASON = 160


class MpiComplaints:
    """Open MPI's messages about its start, kept until it is known whether it begins in spite of
    them.

    Attributes:
      are_fatal: whether one says that Open MPI, or a rank's part of it, cannot begin.
    """

    def __init__(self) -> None:
        self.are_fatal = False
        self._lines: list[bytes] = []
        self._line_reason = ""
        self._block: list[str] = []
        self._block_is_first = True

    def take(self, line: bytes) -> bool:
        """Keeps a line if it is such a message, without the tag of its rank; returns whether it
        is.
        """
        match = _LINE.match(line)
        if match is None:
            return False
        self._keep(line)
        reason = (match["reason"] or b"").decode(errors="replace")
        self._line_reason = self._line_reason or reason.partition(" in file ")[0].strip()
        return True

    def begin_block(self, rule: bytes, line: bytes) -> None:
        """Keeps the first line of a block, and the rule above it."""
        self._lines.append(rule)
        self.take_block_line(line, is_rule=False)

    def take_block_line(self, line: bytes, *, is_rule: bool) -> None:
        """Keeps a further line of a block, or the rule that ends it."""
        self._keep(line)
        if is_rule:
            self._block_is_first = False
        elif self._block_is_first:
            self._block.append(line.decode(errors="replace").strip())

    def _keep(self, line: bytes) -> None:
        self._lines.append(line)
        self.are_fatal = self.are_fatal or bool(_FATAL.search(line))

    def summary(self) -> str:
        """Returns one line for the user; "" if Open MPI has not complained."""
        if not self._lines:
            return ""
        reason = printable(
            (" ".join(filter(None, self._block)) or self._line_reason)[:_MAX_REASON].rstrip(". ")
        )
        return (
            f"error: Open MPI could not start the ranks{f' ({reason})' if reason else ''}. Check"
            " the limits (ulimit -a), the network interfaces (ip link) and the space in TMPDIR on"
            " each host, or run hybrid-imagenet doctor."
        )

    def text(self) -> bytes:
        """Returns the messages as they came, for a job that started in spite of them."""
        return b"".join(self._lines)
