"""Reads what a launcher writes on standard error: what it says of the job, and what of it is for
the user.

mpirun and horovodrun pass on what the ranks print, and say in words of their own, as ssh does, what
became of ranks and hosts. Of a rank that was lost the others say much, which is left out or told
once.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from hybrid_imagenet.comm import lost_rank, out_of_memory
from hybrid_imagenet.comm.quiet import GREETINGS
from hybrid_imagenet.errors import printable
from hybrid_imagenet.resilience import mpi_complaints

TAG = re.compile(
    rb"(\[[\d,]+\]<std(err|out)>: ?)?"
)  # mpirun's and horovodrun's, before each line of a rank
# Lines that TensorFlow writes to standard error whatever its log settings, once or twice per rank,
# among them the information (I) that 2.18 to 2.20 log before their log is set up; and what Open MPI
# says when the child that it starts ssh with is quicker than itself.
_GREETINGS = re.compile(
    "|".join(GREETINGS).encode() + rb"| util\.cc:\d*\] oneDNN supports DT_HALF only on platforms"
    rb"|I0000 00:00:\d+\.\d+ +\d+ \w+\.(?:cc|h):\d+\] "
    rb"|plm:rsh: Warning: setpgid\(\d+,\d+\) failed in parent|^mpirun: Forwarding signal \d+ to job"
)
# What Open MPI, Horovod and TensorFlow write of their own when another rank is gone.
_LOST = re.compile(
    rb"\] Read -1, expected \d+, errno = 3\b|\] ORTE_ERROR_LOG: Out of resource in file"
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
_RULE = re.compile(rb"-{70,80}\r?\n?")
# How the blocks begin in which Open MPI tells that ranks have ended, which have said why
# themselves, or that hosts could not be reached, which ssh has said.
_BEGINNINGS = (
    b"Primary job  terminated normally, but",
    b"mpirun noticed that process rank",
    b"mpirun detected that one or more processes exited with non-zero status",
    b"mpirun has exited due to process rank",
    b"An MPI communication peer process has unexpectedly disconnected",
    b"ORTE was unable to reliably start one or more daemons",
    b"ORTE has lost communication with a remote daemon",
    b"ORTE does not know how to route a message to the specified daemon",
)
# Open MPI's words on a rank; its words and ssh's on a host.
_KILLED = re.compile(rb"process rank (\d+)(?: with PID \d+)? on node (\S+) exited on signal (\d+)")
_LOST_HOST = re.compile(
    rb"^\s*Remote daemon: \S+ on node (?P<daemon>\S+)|^Timeout, server (?P<silent>\S+) not"
    rb" responding"
    rb"|^Connection to (?P<closed>\S+) closed by remote host|^ssh: connect to host (?P<absent>\S+)"
    rb" port "
)
_ABORTS = (
    signal.SIGABRT,
    signal.SIGSEGV,
)  # how TensorFlow and CUDA end a process that they cannot continue
_LONGEST = 50  # lines of a block
_WHY = re.compile(rb"error: |rank \d+: unexpected error")  # how a rank's own words on its end begin
# ssh's words for a name that it cannot resolve, whatever launcher has called it.
_UNKNOWN_HOST = re.compile(rb"ssh: Could not resolve hostname ([^:\s]+)")
_NO_PROGRAM = re.compile(
    rb"/orted: (No such file|not found|Permission denied)"
)  # a shell's, on another host
_NO_LOGIN = re.compile(rb"^Host key verification failed|: Permission denied \(")  # ssh's


class Killed(NamedTuple):
    """A rank that was ended by a signal, by its number and host."""

    rank: int
    host: str
    signal: int
    after_gpu_memory_ran_out: bool = False

    def __str__(self) -> str:
        """One line for the user."""
        try:
            name = f" ({signal.Signals(self.signal).name})"
        except ValueError:  # a real-time one
            name = ""
        by = f"signal {self.signal}{name}"
        if self.after_gpu_memory_ran_out:
            by += (
                " because its GPU ran out of memory; use a smaller --per_gpu_batch, or one rank on"
                " each GPU"
            )
        elif self.signal == signal.SIGKILL:
            by += ", as the kernel does when memory runs out (check dmesg on that host)"
        return (
            f"error: rank {self.rank} on {printable(self.host)} was ended by {by}; start again with"
            " --resume"
        )


class LauncherOutput:
    """Standard error of a launcher, line by line.

    Attributes:
      killed: the first rank that a report says was ended by a signal.
      lost_host: the first host that a report, or ssh, says cannot be reached any more; "" without
      one.
      unknown_host: one whose name ssh does not know; "" without one.
      ended: whether a report says that ranks have ended by themselves, and not well.
      explained: whether a rank has said why it ends.
      lost_rank: what the first rank has said that lost another one; b"" without one.
      mpi: what Open MPI has written about its start.
    """

    def __init__(self) -> None:
        self.killed: Killed | None = None
        self.lost_host, self.unknown_host, self.lost_rank = "", "", b""
        self.ended = self.explained = False
        self.mpi = mpi_complaints.MpiComplaints()
        self._in_mpi_block = False
        self._gpu_memory_ran_out = False  # a rank's log has said so, which may abort then
        self._no_program = False  # a host has no Open MPI at the path that it has here
        self._no_login = False  # ssh has said that a host lets it not in
        self._rule = b""  # a line of dashes of which it is not known yet what follows
        self._left = 0  # lines that a report may still have

    def why_not_started(self, *, by_ssh: bool) -> str:
        """Returns a line on what keeps ranks from starting, "" if none is known; `by_ssh`: the exit
        code is ssh's.
        """
        if by_ssh and self.unknown_host:
            name = printable(self.unknown_host)
            return (
                f"error: host {name}: ssh cannot resolve this name: check -H, and that `ssh {name}"
                " true` works"
            )
        if by_ssh and self._no_login:
            return "error: ssh must log in without a password: check with hybrid-imagenet doctor -H"
        if self._no_program:
            return (
                "error: a host has no environment where this one has it: run launch/setup.sh there"
            )
        return ""

    def passed_on(self, line: bytes) -> bytes:
        """Returns what of a line, and of one that was kept back, is for the user."""
        return b"".join(
            each
            for each in self._outside_reports(line).splitlines(keepends=True)
            if self._is_for_user(each)
        )

    def rest(self) -> bytes:
        """Returns what was kept back when nothing more comes."""
        kept, self._rule = self._rule, b""
        return kept

    def _is_for_user(self, line: bytes) -> bool:
        own = line[TAG.match(line).end() :]  # type: ignore[union-attr]
        if unknown := _UNKNOWN_HOST.search(line):
            self.unknown_host = unknown[1].decode(errors="replace")
            return False
        if own.startswith(lost_rank.LINE.encode()):
            self.lost_rank = self.lost_rank or own
            return False
        if _GREETINGS.search(line) or _LOST.search(own.rstrip()):
            return False
        if self.mpi.take(own):
            return False
        self.explained = self.explained or bool(_WHY.match(own))
        self._gpu_memory_ran_out = self._gpu_memory_ran_out or out_of_memory.is_log_line_of_gpu(own)
        self._no_program = self._no_program or bool(_NO_PROGRAM.search(own))
        self._no_login = self._no_login or bool(_NO_LOGIN.search(own))
        return True

    def _outside_reports(self, line: bytes) -> bytes:
        found = _KILLED.search(line)
        if found:
            aborted = self._gpu_memory_ran_out and int(found[3]) in _ABORTS
            self.killed = self.killed or Killed(
                int(found[1]), found[2].decode(errors="replace"), int(found[3]), aborted
            )
        if lost := _LOST_HOST.search(line):
            self.lost_host = self.lost_host or (lost[lost.lastgroup or 0]).decode(errors="replace")
        if self._left:
            is_rule = bool(_RULE.fullmatch(line))
            self._left = 0 if is_rule else self._left - 1
            if self._in_mpi_block:
                self.mpi.take_block_line(line, is_rule=is_rule)
                self._in_mpi_block = not is_rule
            return b""
        kept, self._rule = self._rule, b""
        if kept and line.startswith(_BEGINNINGS):
            self.ended = self.ended or line.startswith(_BEGINNINGS[2])
            self._left = _LONGEST
            return b""
        if kept and line.startswith(mpi_complaints.BEGINNINGS):
            self.mpi.begin_block(kept, line)
            self._in_mpi_block = True
            self._left = _LONGEST
            return b""
        if found:
            return kept
        if _RULE.fullmatch(line):
            self._rule = line
            return kept
        return kept + line
