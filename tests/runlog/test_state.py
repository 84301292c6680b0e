"""The state of a run from its lock, its last record and the time."""

import os
import socket
import time

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import run_dir, state
from tests.support.processes import python

HERE = socket.gethostname()
EPOCH = {"kind": "epoch", "epoch": 1, "step": 40}
DIVERGED = {"kind": "diverged", "step": 44, "train_loss": None}


@pytest.mark.parametrize(
    ("records", "summary", "host", "age", "expected"),
    [
        ([EPOCH], {"steps": 40, "stop": "finished"}, HERE, 0, state.FINISHED),
        ([EPOCH], {"steps": 40, "stop": "target"}, HERE, 0, state.FINISHED),
        ([EPOCH], {"steps": 40, "stop": "preempted"}, HERE, 0, state.STOPPED),
        ([EPOCH], {"steps": 40, "stop": "preempted"}, "other", 0, state.STOPPED),
        ([EPOCH, DIVERGED], {}, HERE, 0, state.DIVERGED),
        ([EPOCH, DIVERGED], {"steps": 40, "stop": "preempted"}, "other", 0, state.DIVERGED),
        ([EPOCH], {}, HERE, 0, state.KILLED),
        ([], {}, HERE, 0, state.KILLED),
        ([EPOCH], {}, "other", 60, state.UNKNOWN),
        ([EPOCH], {}, "other", 3600, state.KILLED),
    ],
)
def test_a_run_without_a_lock_is_judged_by_its_records_and_by_time(
    tmp_path, records, summary, host, age, expected
):
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (time.time() - age,) * 2)
    assert state.run_state(tmp_path, records, summary, host) == expected
    assert bool(state.next_command(expected, tmp_path)) == (expected != state.FINISHED)


def test_a_summary_of_an_earlier_session_does_not_count():
    assert state.describes_last_session({"steps": 40}, [EPOCH])
    assert not state.describes_last_session({"steps": 40}, [EPOCH, {"kind": "step", "step": 41}])
    assert state.describes_last_session({}, [])


PROGRAM = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
from hybrid_imagenet.runlog import run_dir
held = run_dir.RunDirectory(pathlib.Path(sys.argv[1]), resume=True)
print("held", flush=True)
signal.sigwait([signal.SIGTERM])
"""


def test_a_run_that_holds_its_lock_runs_and_is_stopped_by_its_process(tmp_path):
    with pytest.raises(UserError, match="does not run on this host"):
        state.stop(tmp_path)
    process = python("-c", PROGRAM, tmp_path)
    assert process.stdout.readline() == "held\n"
    assert state.run_state(tmp_path, [EPOCH, DIVERGED], {"steps": 40}, "other") == state.RUNNING
    assert files.lock_holder(tmp_path) == f"{HERE} {process.pid}"
    with pytest.raises(UserError, match="in use by another run"):  # looking has not taken the lock
        run_dir.RunDirectory(tmp_path, resume=True)
    (tmp_path / "lock").write_text("elsewhere 17\n")
    with pytest.raises(UserError, match="runs on elsewhere; there: kill -TERM 17"):
        state.stop(tmp_path)
    (tmp_path / "lock").write_text(f"{HERE} {os.getpid()}\n")  # as the number may be in a container
    with pytest.raises(UserError, match="cannot be reached"):
        state.stop(tmp_path)
    (tmp_path / "lock").write_text(f"{HERE} {process.pid}\n")
    state.stop(tmp_path)
    assert process.wait(20) == 0
    assert files.lock_holder(tmp_path) is None
