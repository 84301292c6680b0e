"""Tests the exit code of a job and the printed cause, as a table of observations."""

import signal

import pytest

from hybrid_imagenet.cluster.job_lines import ProgramEnd, RankFailure
from hybrid_imagenet.resilience.exit_code import RankExit
from hybrid_imagenet.resilience.job_result import JobResult
from hybrid_imagenet.resilience.launcher_output import ExitedRank, KilledRank, LauncherOutput
from hybrid_imagenet.resilience.stop_signals import UNSAVED, StopRequests

KILLED = KilledRank(3, "far", signal.SIGKILL)
ABORTED = KilledRank(3, "far", signal.SIGABRT)
TERMINATED = KilledRank(3, "far", signal.SIGTERM)
SAVED = RankExit(75, saved=True)
UNSAVED_EXIT = RankExit(75, saved=False)
STALLED = RankExit(4, saved=True)
KILLED_RANK = (
    "error: rank 3 on far was killed by signal 9 (SIGKILL). The kernel does this when memory runs"
    " out: check dmesg on that host."
)
LOST = "error: the connection to host far is lost"
ANY_HOST = "error: the connection to a host is lost"
RAISED = RankFailure(1, "far", 1, "failed: ValueError: no class")
EXITED_BY_PROGRAM = RankFailure(0, "near", 3, "exited with code 3 (sys.exit)", is_exit=True)
NOT_STARTED = (
    "error: mpirun ended with exit code 255 before any rank had started. Check it with"
    " hybrid-imagenet doctor."
)
SILENT_END = "error: mpirun ended with exit code {}, and no rank has printed why."
LEFT = (
    "error: rank 1 ended before the others, without a message and without leaving MPI, for example"
    " by os._exit(0). Let its program end normally."
)
EXITED = (
    "error: rank 1 ended with exit code 3 and without a message of this program, for example by"
    " sys.exit or os._exit."
)
LAUNCHER_KILLED = "error: the launcher of the ranks was killed by SIGKILL"


def result(launcher_code, *exits, output=(), stop=0, forced_by=0, **facts):
    """Returns the result of a job.

    Args:
      launcher_code: Exit code of the launcher.
      *exits: The exits that ranks have reported.
      output: Attributes of the launcher's output.
      stop: The signal that has requested a stop; 0 if there was none.
      forced_by: The signal that has ended the job at once; 0 if there was none.
      **facts: Other attributes of the result.
    """
    launcher_output = LauncherOutput()
    for name, value in dict(output).items():
        setattr(launcher_output, name, value)
    requests = StopRequests()
    requests.stop = bool(stop)
    requests.first_signal = stop
    requests.forced_by = forced_by
    defaults = {
        "launcher": "mpirun",
        "rank_hosts": (),
        "early_ranks": (),
        "failures": (),
        "was_killed": False,
        "is_script": False,
        "all_ranks_are_local": False,
        "no_rank_started": False,
    }
    return JobResult(
        launcher_code=launcher_code,
        output=launcher_output,
        rank_exits=exits,
        requests=requests,
        **(defaults | facts),
    )


@pytest.mark.parametrize(
    ("job", "code", "printed"),
    [
        # Ended at once by the third signal, unless the job was complete or saved.
        (result(1, stop=2, forced_by=2), 130, ""),
        (result(0, stop=2, forced_by=2), 0, ""),
        (result(1, SAVED, stop=2, forced_by=2), 75, ""),
        # Stopped by request before the first save.
        (result(1, UNSAVED_EXIT, STALLED, stop=15), 75, UNSAVED),
        (result(1, UNSAVED_EXIT, stop=2), 130, UNSAVED),
        (
            result(1, UNSAVED_EXIT, stop=15, is_script=True),
            75,
            "stopped: what the program saved before is kept",
        ),
        # A killed rank, whatever the others report, unless a request or this process is the cause.
        (result(137, STALLED, output={"killed_rank": KILLED}), 137, KILLED_RANK),
        # A program that fails, whatever other ranks report; but not instead of a killed rank.
        (result(4, STALLED, failures=[RAISED]), 1, f"error: {RAISED}"),
        (
            result(1, failures=[RAISED, RAISED, EXITED_BY_PROGRAM]),
            1,
            f"error: {RAISED} (1 more rank failed too)",
        ),
        (result(4, failures=[EXITED_BY_PROGRAM]), 3, f"error: {EXITED_BY_PROGRAM}"),
        (result(137, output={"killed_rank": KILLED}, failures=[RAISED]), 137, KILLED_RANK),
        (result(134, output={"killed_rank": ABORTED}, failures=[RAISED]), 1, f"error: {RAISED}"),
        (result(1, stop=15, failures=[EXITED_BY_PROGRAM]), 75, UNSAVED),
        (result(1, stop=15, failures=[RAISED]), 1, f"error: {RAISED}"),
        (result(137, SAVED, output={"killed_rank": KILLED}), 75, ""),
        (result(137, STALLED, output={"killed_rank": KILLED, "cause_printed": True}), 4, ""),
        (result(137, STALLED, output={"killed_rank": KILLED}, was_killed=True), 4, ""),
        (result(143, SAVED, output={"killed_rank": TERMINATED}, stop=15), 75, ""),
        (result(143, output={"killed_rank": TERMINATED}, stop=15), 75, UNSAVED),
        # A scheduler has stopped ranks that had nothing to save.
        (result(75, UNSAVED_EXIT), 75, UNSAVED),
        (result(143, UNSAVED_EXIT), 75, UNSAVED),
        # The code of the ranks: the launcher's, or the most specific one that was reported.
        (result(3), 3, SILENT_END.format(3)),
        (result(3, output={"cause_printed": True}), 3, ""),
        (result(1, SAVED, STALLED), 4, ""),
        (result(1, SAVED), 75, ""),
        # A lost host has one code, unless a stop was requested.
        (result(75, SAVED, output={"lost_host": "far"}), 4, LOST),
        (result(205, SAVED, output={"lost_host": "far"}, stop=15), 75, ""),
        (result(205, output={"lost_host": "far"}), 4, LOST),
        (
            result(255, output={"lost_host": "far"}, no_rank_started=True),
            4,
            "error: Host far cannot be reached. Check its name, the port, and sshd there.",
        ),
        # mpirun itself was stopped, or fails because its ranks were stopped.
        (result(-10, stop=15), 75, UNSAVED),
        (result(1, stop=15), 75, UNSAVED),
        # Connections.
        (result(255), 4, ANY_HOST),
        (result(255, all_ranks_are_local=True), 1, NOT_STARTED),
        (result(255, no_rank_started=True), 1, NOT_STARTED),
        (result(255, output={"ranks_exited": True}), 255, SILENT_END.format(255)),
        # The launcher's own end.
        (result(-9), 137, LAUNCHER_KILLED),
        (result(-9, stop=15), 137, ""),
        (result(1), 1, SILENT_END.format(1)),
        # A rank that has ended without a message.
        (result(1, output={"exited_rank": ExitedRank(1)}), 1, LEFT),
        (result(3, output={"exited_rank": ExitedRank(1, 3)}), 3, EXITED),
        (
            result(3, output={"exited_rank": ExitedRank(1, 3)}, rank_hosts=["near", "far"]),
            3,
            EXITED.replace("rank 1", "rank 1 on far"),
        ),
        (result(7, output={"exited_rank": ExitedRank(1, 7), "traceback_printed": True}), 7, ""),
        # A rank that has lost another one is not the cause.
        (result(4, output={"exited_rank": ExitedRank(1, 4)}), 4, SILENT_END.format(4)),
    ],
)
def test_job_result_returns_the_code_and_prints_the_cause(job, code, printed, capfd):
    assert job.exit_code() == code
    assert capfd.readouterr().err.splitlines() == ([printed] if printed else [])


def test_job_result_names_a_rank_that_ended_before_another_one_lost_it(capfd):
    job = result(1, output={"lost_rank_line": b"lost\n"}, early_ranks=[ProgramEnd(1, 4, "far")])
    assert job.exit_code() == 1
    assert capfd.readouterr().err.splitlines() == [
        "lost",
        "error: rank 1 on far ended before the others, without an error. End each loop after a"
        " number of steps that all ranks share.",
    ]
