"""Reads a launcher's standard error, and selects the lines that are for the user.

mpirun and horovodrun pass on what the ranks print. They also print their own messages about ranks
and hosts, and so does ssh. After a rank is lost, the other ranks print much about it; that is left
out or shown once.
"""

from __future__ import annotations

import enum
import re
import signal
from typing import NamedTuple

from hybrid_imagenet.cluster import out_of_memory
from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.errors import printable
from hybrid_imagenet.resilience import mpi_startup_errors

# mpirun and horovodrun begin each line of a rank with this tag.
TAG = re.compile(rb"(\[[\d,]+\]<std(err|out)>: ?)?")
# Users do not see the tag of rank 0, which prints nearly everything. If a rank writes a line in
# parts, there may be a tag before each part.
_RANK_0_ERROR_TAG = b"[1,0]<stderr>:"
_RANK_0_OUTPUT_TAG = b"[1,0]<stdout>:"
# Lines that the user does not need. TensorFlow writes some of them to standard error whatever its
# log settings are, once or twice per rank. Among them are information lines (I) that TensorFlow
# 2.18 to 2.20 print before their log is set up. Open MPI prints the setpgid warning if the child
# process that becomes ssh is faster than its parent.
_GREETINGS = re.compile(
    rb"^WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"| port\.cc:\d*\] oneDNN custom operations are on\."
    rb"|\] This TensorFlow binary is optimized to use available CPU instructions"
    rb"|^To enable the following instructions:"
    rb"| util\.cc:\d*\] oneDNN supports DT_HALF only on platforms"
    rb"|I0000 00:00:\d+\.\d+ +\d+ \w+\.(?:cc|h):\d+\] "
    rb"|plm:rsh: Warning: setpgid\(\d+,\d+\) failed in parent|^mpirun: Forwarding signal \d+ to job"
)
# Messages of Open MPI, Horovod and TensorFlow that follow the loss of another rank. Open MPI's
# copy of libevent warns about the closed connection of a daemon that is lost.
_LOSS_CONSEQUENCES = re.compile(
    rb"^\[warn\] Epoll [A-Z]+\(\d+\) on fd \d+ failed\. "
    rb"|\] Read -1, expected \d+, errno = 3\b|\] ORTE_ERROR_LOG: Out of resource in file"
    rb" \S*/show_help\.c "
    rb"| Horovod background loop uncaught exception: "
    rb"| base_collective_executor\.cc:\d+\] BaseCollectiveExecutor::StartAbort | ring_\w+\.cc:\d+\]"
    rb" Aborting Ring"
    rb"|^Additional GRPC error information from remote target /job:worker|^:UNKNOWN:Error received"
    rb" from peer"
    rb"|^/job:worker/replica:\d+/task:\d+$|^The tasks have crashed\. Check the task logs for an"
    rb" earlier error"
    rb"|^The error could be from a previous operation\. Restart your program to reset\."
)
# Open MPI prints a line of dashes before and after each block of text.
_RULE = re.compile(rb"-{70,80}\r?\n?")
# The first words of blocks in which Open MPI reports that ranks have ended, or that hosts could not
# be reached. The user does not need them, because the ranks or ssh have printed the reason.
_RANKS_EXITED = b"mpirun detected that one or more processes exited with non-zero status"
_BLOCK_BEGINNINGS = (
    b"Primary job  terminated normally, but",
    b"mpirun noticed that process rank",
    _RANKS_EXITED,
    b"mpirun has exited due to process rank",
    b"An MPI communication peer process has unexpectedly disconnected",
    b"ORTE was unable to reliably start one or more daemons",
    b"ORTE has lost communication with a remote daemon",
    b"ORTE does not know how to route a message to the specified daemon",
)
_MAX_BLOCK_LINES = 50
# Messages of Open MPI about a rank.
_KILLED = re.compile(
    rb"process rank (?P<rank>\d+)(?: with PID \d+)? on node (?P<host>\S+) exited on signal"
    rb" (?P<signal>\d+)"
)
# Open MPI reports the first rank that ends with another code than 0, or that ends without leaving
# MPI, as after os._exit(0).
_EXITED_RANK = re.compile(rb"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]")
_EXIT_CODE = re.compile(rb"Exit code: +(?P<code>\d+)")
_RANK_LEFT = re.compile(rb"mpirun has exited due to process rank (?P<rank>\d+) ")
# Messages of Open MPI and of ssh about a host.
_LOST_HOST = re.compile(
    rb"^\s*Remote daemon: \S+ on node (?P<daemon>\S+)|^Timeout, server (?P<silent>\S+) not"
    rb" responding"
    rb"|^Connection to (?P<closed>\S+) closed by remote host|^ssh: connect to host (?P<absent>\S+)"
    rb" port "
)
# Signals by which TensorFlow and CUDA end a process that cannot continue.
ABORT_SIGNALS = (signal.SIGABRT, signal.SIGSEGV)
# How the line begins in which a rank explains its own end.
_CAUSE = re.compile(rb"error: ")
_TRACEBACK = b"Traceback (most recent call last)"
# ssh prints this if it cannot resolve a name, whichever launcher has called it.
_UNKNOWN_HOST = re.compile(rb"ssh: Could not resolve hostname ([^:\s]+)")
# A shell on another host prints this if it does not find Open MPI's daemon.
_NO_DAEMON = re.compile(rb"/orted: (No such file|not found|Permission denied)")
# ssh prints this if the host rejects the login.
_NO_LOGIN = re.compile(rb"^Host key verification failed|: Permission denied \(")


class LineEvent(enum.Enum):
    """Kinds of lines that a launcher prints.

    The first three kinds are not shown: `NOISE` does not help the user, and `JobResult` reports an
    unknown host or a lost rank at the end.
    """

    NOISE = enum.auto()
    UNKNOWN_HOST = enum.auto()
    LOST_RANK = enum.auto()
    CAUSE = enum.auto()
    TRACEBACK = enum.auto()
    GPU_MEMORY_ERROR = enum.auto()
    MISSING_DAEMON = enum.auto()
    REJECTED_LOGIN = enum.auto()
    OTHER = enum.auto()


class KilledRank(NamedTuple):
    """A rank that was ended by a signal."""

    rank: int
    host: str
    signal: int
    is_gpu_memory_error: bool = False

    def message(self, *, is_script: bool) -> str:
        """Returns one line for the user.

        Args:
          is_script: Whether the ranks ran a script of the user, which has none of our flags.
        """
        try:
            name = f" ({signal.Signals(self.signal).name})"
        except ValueError:
            # Real-time signals have no name.
            name = ""
        line = (
            f"error: rank {self.rank} on {printable(self.host)} was killed by signal"
            f" {self.signal}{name}"
        )
        if self.is_gpu_memory_error:
            batch = "batch" if is_script else "--per_gpu_batch"
            return (
                f"{line} because its GPU ran out of memory. Use a smaller {batch}, or one rank on"
                " each GPU."
            )
        if self.signal == signal.SIGKILL:
            return f"{line}. The kernel does this when memory runs out: check dmesg on that host."
        return f"{line}."


class ExitedRank(NamedTuple):
    """A rank that has ended by itself, according to Open MPI.

    Attributes:
      rank: Number of the rank.
      code: Its exit code; None if Open MPI does not report it.
    """

    rank: int
    code: int | None = None

    def message(self, host: str) -> str:
        """Returns one line for the user.

        Args:
          host: The host of the rank, or "" if it is not known.
        """
        rank = f"rank {self.rank} on {printable(host)}" if host else f"rank {self.rank}"
        if self.code is None:
            return (
                f"error: {rank} ended before the others, without a message and without leaving MPI,"
                " for example by os._exit(0). Let its program end normally."
            )
        return (
            f"error: {rank} ended with exit code {self.code} and without a message of this program,"
            " for example by sys.exit or os._exit."
        )


class OutputTags:
    """Removes the tag of rank 0 from a launcher's standard output, which comes in pieces."""

    def __init__(self) -> None:
        self._unfinished_tag = b""

    def remove(self, text: bytes) -> bytes:
        """Returns the text for the user; keeps back the beginning of a tag at its end."""
        text = (self._unfinished_tag + text).replace(_RANK_0_OUTPUT_TAG, b"")
        self._unfinished_tag = b""
        for length in range(len(_RANK_0_OUTPUT_TAG) - 1, 0, -1):
            if text.endswith(_RANK_0_OUTPUT_TAG[:length]):
                self._unfinished_tag = text[-length:]
                return text[:-length]
        return text

    def flush(self) -> bytes:
        """Returns what was kept back; call it after the last piece."""
        return self._unfinished_tag


class LauncherOutput:
    """Reads a launcher's standard error line by line.

    Attributes:
      killed_rank: The first rank that a message says was ended by a signal, or None.
      lost_host: The first host that Open MPI or ssh says cannot be reached, or "".
      unknown_host: A host whose name ssh cannot resolve, or "".
      exited_rank: The first rank that has ended by itself and so has ended the job, or None.
      ranks_exited: Whether Open MPI says that ranks have ended by themselves with an exit code
        other than 0.
      cause_printed: Whether a rank has printed why it ends.
      traceback_printed: Whether a rank has printed a traceback.
      lost_rank_line: The line of the first rank that lost its peer, or b"".
      mpi_errors: What Open MPI has printed about its own start.
    """

    def __init__(self) -> None:
        self.killed_rank: KilledRank | None = None
        self.lost_host = ""
        self.unknown_host = ""
        self.exited_rank: ExitedRank | None = None
        self.ranks_exited = False
        self.cause_printed = False
        self.traceback_printed = False
        self.lost_rank_line = b""
        self.mpi_errors = mpi_startup_errors.MpiStartupErrors()
        # Whether a rank has logged that its GPU has no memory left; it may abort after that.
        self._gpu_memory_ran_out = False
        # Whether a host has no Open MPI at the path where this host has it.
        self._daemon_is_missing = False
        self._login_was_rejected = False
        # A line of dashes, kept until the next line shows whether a block begins.
        self._pending_rule = b""
        # How many lines the block may still have, 0 outside a block.
        self._remaining_block_lines = 0
        self._in_mpi_error_block = False

    def filter(self, line: bytes) -> bytes:
        """Returns the lines for the user: this one, and maybe one that was kept back."""
        lines = self._drop_blocks(line).splitlines(keepends=True)
        lines_for_user = [each for each in lines if self._record_line(each)]
        return b"".join(lines_for_user).replace(_RANK_0_ERROR_TAG, b"")

    def flush(self) -> bytes:
        """Returns what was kept back; call it after the last line."""
        return self._take_pending_rule()

    def why_not_started(self, *, is_ssh_error: bool) -> str:
        """Returns a line on what keeps ranks from starting, or "" if nothing is known.

        Args:
          is_ssh_error: Whether the exit code may be that of ssh.
        """
        if is_ssh_error and self.unknown_host:
            name = printable(self.unknown_host)
            return (
                f"error: ssh cannot resolve the host name {name}. Check -H, and that `ssh {name}"
                " true` works."
            )
        if is_ssh_error and self._login_was_rejected:
            return (
                "error: ssh cannot log in without a password. Check the hosts with hybrid-imagenet"
                " doctor -H HOST,..."
            )
        if self._daemon_is_missing:
            return (
                "error: A host has no environment at the path where this host has it. Run"
                " launch/setup.sh there."
            )
        return ""

    def _record_line(self, line: bytes) -> bool:
        """Records what a line reports about the job; returns whether to show the line."""
        text = line[TAG.match(line).end() :]  # type: ignore[union-attr]
        event = _classify(text)
        if event is LineEvent.NOISE:
            return False
        if event is LineEvent.UNKNOWN_HOST:
            match = _UNKNOWN_HOST.search(text)
            self.unknown_host = match[1].decode(errors="replace")  # type: ignore[index]
            return False
        if event is LineEvent.LOST_RANK:
            self.lost_rank_line = self.lost_rank_line or text
            return False
        if self.mpi_errors.keep_line(text):
            return False
        if event is LineEvent.CAUSE:
            self.cause_printed = True
        elif event is LineEvent.TRACEBACK:
            self.traceback_printed = True
        elif event is LineEvent.GPU_MEMORY_ERROR:
            self._gpu_memory_ran_out = True
        elif event is LineEvent.MISSING_DAEMON:
            self._daemon_is_missing = True
        elif event is LineEvent.REJECTED_LOGIN:
            self._login_was_rejected = True
        return True

    def _drop_blocks(self, line: bytes) -> bytes:
        """Returns a line, and the one kept back, unless they belong to a block of Open MPI."""
        reports_killed_rank = self._find_killed_rank(line)
        self._find_exited_rank(line)
        self._find_lost_host(line)
        if self._remaining_block_lines:
            self._skip_block_line(line)
            return b""
        rule = self._take_pending_rule()
        if rule and line.startswith(_BLOCK_BEGINNINGS):
            if line.startswith(_RANKS_EXITED):
                self.ranks_exited = True
            self._remaining_block_lines = _MAX_BLOCK_LINES
            return b""
        if rule and line.startswith(mpi_startup_errors.BLOCK_BEGINNINGS):
            self.mpi_errors.begin_block(rule, line)
            self._in_mpi_error_block = True
            self._remaining_block_lines = _MAX_BLOCK_LINES
            return b""
        if reports_killed_rank:
            return rule
        if _RULE.fullmatch(line):
            self._pending_rule = line
            return rule
        return rule + line

    def _find_killed_rank(self, line: bytes) -> bool:
        match = _KILLED.search(line)
        if match is None:
            return False
        if self.killed_rank is None:
            number = int(match["signal"])
            self.killed_rank = KilledRank(
                rank=int(match["rank"]),
                host=match["host"].decode(errors="replace"),
                signal=number,
                is_gpu_memory_error=self._gpu_memory_ran_out and number in ABORT_SIGNALS,
            )
        return True

    def _find_exited_rank(self, line: bytes) -> None:
        if self.exited_rank is None and (match := _RANK_LEFT.match(line)):
            self.exited_rank = ExitedRank(int(match["rank"]))
        if not self._remaining_block_lines:
            return
        if self.exited_rank is None and (match := _EXITED_RANK.search(line)):
            self.exited_rank = ExitedRank(int(match["rank"]))
        elif self.exited_rank is not None and (match := _EXIT_CODE.search(line)):
            self.exited_rank = self.exited_rank._replace(code=int(match["code"]))

    def _find_lost_host(self, line: bytes) -> None:
        match = _LOST_HOST.search(line)
        if match is not None and not self.lost_host:
            self.lost_host = match[match.lastgroup or 0].decode(errors="replace")

    def _skip_block_line(self, line: bytes) -> None:
        is_rule = bool(_RULE.fullmatch(line))
        self._remaining_block_lines = 0 if is_rule else self._remaining_block_lines - 1
        if self._in_mpi_error_block:
            self.mpi_errors.keep_block_line(line, is_rule=is_rule)
            self._in_mpi_error_block = not is_rule

    def _take_pending_rule(self) -> bytes:
        rule = self._pending_rule
        self._pending_rule = b""
        return rule


def _classify(text: bytes) -> LineEvent:
    """Returns what a line reports.

    Args:
      text: The line without the tag of its rank.
    """
    if _UNKNOWN_HOST.search(text):
        return LineEvent.UNKNOWN_HOST
    if text.startswith(lost_rank.LOST_RANK_PREFIX.encode()):
        return LineEvent.LOST_RANK
    if _GREETINGS.search(text) or _LOSS_CONSEQUENCES.search(text.rstrip()):
        return LineEvent.NOISE
    if _CAUSE.match(text):
        return LineEvent.CAUSE
    if text.startswith(_TRACEBACK):
        return LineEvent.TRACEBACK
    if out_of_memory.is_log_line_of_gpu(text):
        return LineEvent.GPU_MEMORY_ERROR
    if _NO_DAEMON.search(text):
        return LineEvent.MISSING_DAEMON
    if _NO_LOGIN.search(text):
        return LineEvent.REJECTED_LOGIN
    return LineEvent.OTHER
