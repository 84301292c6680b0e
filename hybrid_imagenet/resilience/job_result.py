"""Derives the exit code of a job, and prints the cause of its end if no rank has printed it.

The launcher's exit code is not enough: mpirun and horovodrun pass on the codes of ranks in a few
cases only. So the result also depends on the exit codes that the ranks report (`exit_code`), on the
messages of the launcher and ssh (`launcher_output`), and on the user's requests to stop
(`stop_signals`).
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence

from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_NUMERICS,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
    pluralize,
    printable,
)
from hybrid_imagenet.resilience.exit_code import RankExit
from hybrid_imagenet.resilience.launcher_output import ABORT_SIGNALS, LauncherOutput
from hybrid_imagenet.resilience.stop_signals import UNSAVED, StopRequests

# mpirun and ssh return this code if the connection to a host is lost.
_SSH_CODE = 255
# The exit codes of a launcher that a request to stop has ended. They are negative if the signal has
# killed the launcher, and 128 + signal if the launcher has handled it.
_STOP_SIGNAL_CODES = {
    -signal.SIGUSR1,
    -signal.SIGTERM,
    128 + signal.SIGUSR1,
    128 + signal.SIGTERM,
}
# If the launcher returns one of these, it is the exit code of the ranks.
_RANK_CODES = (EXIT_OK, EXIT_USAGE, EXIT_NUMERICS, EXIT_STALLED, EXIT_PREEMPTED)
# Rank codes that explain the end of a job. The others follow from the end of another rank.
_CAUSE_CODES = (EXIT_USAGE, EXIT_NUMERICS, EXIT_STALLED)
_MAX_NAMED_RANKS = 3


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Facts about a job when its launcher has ended, from which its exit code follows.

    Attributes:
      launcher: Name of the launcher, for messages.
      launcher_code: Its exit code; negative if a signal ended it.
      output: What it has printed.
      rank_exits: Ends of ranks that may have ended the job, as the ranks reported them.
      failures: Ranks whose program has failed, in the order in which they have reported it.
      requests: What the user has asked of the supervisor.
      rank_hosts: The host of each rank, as far as the launcher's command line shows it.
      early_ranks: Ranks whose programs ended without an error while others were still running.
      was_killed: Whether the supervisor has killed the launcher.
      is_script: Whether the ranks run a script of the user, which need not save when it is asked
        to stop.
      all_ranks_are_local: No connection to a host can be lost, because all ranks run on this host.
      no_rank_started: The ranks report when they have started, and none has.
    """

    launcher: str
    launcher_code: int
    output: LauncherOutput
    rank_exits: Sequence[RankExit]
    failures: Sequence[job_lines.RankFailure]
    requests: StopRequests
    rank_hosts: Sequence[str]
    early_ranks: Sequence[job_lines.ProgramEnd]
    was_killed: bool
    is_script: bool
    all_ranks_are_local: bool
    no_rank_started: bool

    def exit_code(self) -> int:
        """Returns the exit code of the job, and prints why it ended.

        The first cause that applies decides. The order matters: a killed rank, for example, makes
        other ranks report that they have lost it.
        """
        output = self.output
        if self._was_ended_at_once():
            return 128 + self.requests.forced_by
        if self.requests.stop and not all(rank.saved for rank in self.rank_exits):
            return self._stopped_unsaved()
        if output.mpi_errors.are_fatal and not self._has_reported_cause():
            _print_error(output.mpi_errors.summary())
            return EXIT_USAGE
        if not output.cause_printed:
            # Open MPI has started in spite of these errors, so the user decides what they mean.
            print_raw(output.mpi_errors.raw_lines())
        if output.killed_rank is not None and self._was_ended_by_killed_rank():
            _print_error(output.killed_rank.message(is_script=self.is_script))
            return 128 + output.killed_rank.signal
        if self._was_ended_by_failure():
            return self._report_failure()
        if not output.cause_printed:
            self._print_loss()
        if self._was_stopped_from_outside_unsaved():
            return self._stopped_unsaved()
        rank_code = self._rank_code()
        if rank_code is not None:
            if rank_code not in (EXIT_OK, EXIT_PREEMPTED):
                self._print_silent_end()
            return rank_code
        if self._was_stopped_with_launcher():
            return self._stopped_unsaved()
        if not self._reported_codes:
            connection_code = self._connection_code()
            if connection_code is not None:
                return connection_code
        return self._launcher_result()

    @property
    def _reported_codes(self) -> list[int]:
        """Exit codes that ranks have reported.

        Ranks with nothing to save are left out: the launcher has ended some of them because of
        others, which does not explain the end of the job.
        """
        return [rank.code for rank in self.rank_exits if rank.saved]

    @property
    def _is_ssh_code(self) -> bool:
        """Whether ssh has returned the exit code; otherwise a rank has returned 255 itself."""
        return self.launcher_code == _SSH_CODE and not self.output.ranks_exited

    def _has_reported_cause(self) -> bool:
        return self.output.cause_printed or bool(self._reported_codes)

    def _was_ended_at_once(self) -> bool:
        """Returns whether a third signal ended the job before it had completed or saved."""
        codes = {self.launcher_code, *self._reported_codes}
        is_complete = EXIT_OK in codes or EXIT_PREEMPTED in codes
        return bool(self.requests.forced_by) and not is_complete

    def _was_ended_by_killed_rank(self) -> bool:
        """Returns whether a rank was killed, but not by a request or by this process."""
        killed = self.output.killed_rank
        if killed is None or self.output.cause_printed or self.was_killed:
            return False
        if EXIT_PREEMPTED in self._reported_codes:
            return False
        if self.failures and killed.signal in ABORT_SIGNALS:
            # TensorFlow and MPI may abort a rank that has lost the one that failed.
            return False
        # A signal that was sent by the request itself is not a failure.
        is_request_signal = (
            self.launcher_code in _STOP_SIGNAL_CODES or 128 + killed.signal in _STOP_SIGNAL_CODES
        )
        return not (self.requests.stop and is_request_signal)

    def _was_ended_by_failure(self) -> bool:
        """Returns whether the program has failed, and has not only followed a request to stop."""
        if not self.requests.stop:
            return bool(self.failures)
        return any(not failure.is_exit for failure in self.failures)

    def _report_failure(self) -> int:
        """Prints the first failure again, after its traceback; returns its exit code."""
        first, *others = self.failures
        number_of_others = len({failure.rank for failure in others} - {first.rank})
        suffix = ""
        if number_of_others:
            suffix = f" ({pluralize(number_of_others, 'more rank')} failed too)"
        _print_error(f"error: {printable(str(first))}{suffix}")
        return first.code

    def _was_stopped_from_outside_unsaved(self) -> bool:
        """Returns whether ranks with nothing to save were stopped, but not by the supervisor.

        A scheduler, for example, may send signals to the ranks themselves.
        """
        is_stop = self.launcher_code == EXIT_PREEMPTED or self.launcher_code in _STOP_SIGNAL_CODES
        return is_stop and bool(self.rank_exits) and not self._reported_codes

    def _was_stopped_with_launcher(self) -> bool:
        """Returns whether a request ended the launcher too, because the launcher also got it."""
        if not self.requests.stop:
            return False
        has_failed = self.launcher_code == EXIT_FAILURE and not self._reported_codes
        return self.launcher_code in _STOP_SIGNAL_CODES or has_failed

    def _rank_code(self) -> int | None:
        """Returns the exit code of the ranks, or None if it is not known."""
        code = self._most_telling_code()
        if code == EXIT_PREEMPTED and self.output.lost_host and not self.requests.stop:
            # No one has asked for a stop. With Horovod, ranks that lose the launcher's daemon can
            # still save; with TensorFlow's engine they cannot. A lost host has one exit code.
            return EXIT_STALLED
        return code

    def _most_telling_code(self) -> int | None:
        if self.launcher_code in _RANK_CODES:
            return self.launcher_code
        for code in self._reported_codes:
            if code in _CAUSE_CODES:
                return code
        if EXIT_PREEMPTED in self._reported_codes:
            return EXIT_PREEMPTED
        return None

    def _connection_code(self) -> int | None:
        """Returns the exit code if a connection failed, at the start or later; None if not."""
        is_ssh_code = self._is_ssh_code
        reason = self.output.why_not_started(is_ssh_error=is_ssh_code)
        if reason:
            _print_error(reason)
            return EXIT_USAGE
        if self.output.lost_host:
            # `_print_loss` names the host.
            return EXIT_STALLED
        if is_ssh_code and (self.all_ranks_are_local or self.no_rank_started):
            if not self.output.cause_printed:
                _print_error(
                    f"error: {self.launcher} ended with exit code {self.launcher_code} before any"
                    " rank had started. Check it with hybrid-imagenet doctor."
                )
            return EXIT_FAILURE
        if is_ssh_code:
            _print_error("error: the connection to a host is lost")
            return EXIT_STALLED
        return None

    def _launcher_result(self) -> int:
        if self.launcher_code >= 0:
            self._print_silent_end()
            return self.launcher_code
        number = -self.launcher_code
        if not self.requests.stop:
            name = signal.Signals(number).name
            _print_error(f"error: the launcher of the ranks was killed by {name}")
        return 128 + number

    def _print_silent_end(self) -> None:
        """Prints which rank has ended the job, if no rank has printed why it ends."""
        output = self.output
        if output.cause_printed or output.traceback_printed or self._reported_codes:
            return
        if self.requests.stop or self.was_killed or self.early_ranks:
            return
        exited = output.exited_rank
        # A rank that has lost its peer exits with this code, and is not the cause.
        if exited is not None and exited.code != EXIT_STALLED:
            is_known = exited.rank < len(self.rank_hosts)
            _print_error(exited.message(self.rank_hosts[exited.rank] if is_known else ""))
        elif not output.lost_rank_line and not output.lost_host:
            _print_error(
                f"error: {self.launcher} ended with exit code {self.launcher_code}, and no rank has"
                " printed why."
            )

    def _stopped_unsaved(self) -> int:
        """Prints that a stop came before the first save; returns its exit code."""
        if self.is_script:
            _print_error("stopped: what the program saved before is kept")
        else:
            _print_error(UNSAVED)
        return self.requests.unsaved_code()

    def _print_loss(self) -> None:
        """Prints which host is lost, or the line of the rank that lost its peer."""
        host = printable(self.output.lost_host)
        if not host or not self.launcher_code or self.requests.stop:
            print_raw(self.output.lost_rank_line)
            if self.output.lost_rank_line and self.early_ranks:
                _print_error(
                    f"error: {ranks_and_hosts(self.early_ranks)} ended before the others, without"
                    " an error. End each loop after a number of steps that all ranks share."
                )
        elif self.no_rank_started:
            _print_error(
                f"error: Host {host} cannot be reached. Check its name, the port, and sshd there."
            )
        else:
            _print_error(f"error: the connection to host {host} is lost")


def ranks_and_hosts(ranks: Sequence[job_lines.ProgramEnd]) -> str:
    """Returns "rank 1 on HOST", or the first of several ranks and how many more there are."""
    names = [f"{rank.rank} on {printable(rank.host)}" for rank in ranks[:_MAX_NAMED_RANKS]]
    noun = "rank" if len(ranks) == 1 else "ranks"
    hidden = len(ranks) - len(names)
    suffix = f" and {hidden} more" if hidden else ""
    return f"{noun} {', '.join(names)}{suffix}"


def print_raw(data: bytes) -> None:
    """Writes bytes of the launcher to standard error, whatever their encoding is."""
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _print_error(text: str) -> None:
    print(text, file=sys.stderr)
