"""Tests of `hybrid_imagenet.runlog.state`."""

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
FAILED = {"kind": "failed", "step": 44, "error": "a.jpg is damaged."}
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
        ([EPOCH, FAILED], {"steps": 44, "stop": "preempted"}, HERE, 0, state.FAILED),
        ([EPOCH, FAILED], {}, "other", 0, state.FAILED),
        ([EPOCH], {}, HERE, 0, state.KILLED),
        ([], {}, HERE, 0, state.KILLED),
        ([EPOCH], {}, "other", 60, state.UNKNOWN),
        ([EPOCH], {}, "other", 3600, state.KILLED),
    ],
)
def test_run_state_without_a_lock_follows_from_records_and_time(
    tmp_path, records, summary, host, age, expected
):
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (time.time() - age,) * 2)
    assert state.run_state(tmp_path, records, summary, host) == expected
    assert bool(state.next_command(expected, tmp_path)) == (expected != state.FINISHED)


def test_describes_last_session_is_false_after_more_steps():
    assert state.describes_last_session({"steps": 40}, [EPOCH])
    assert not state.describes_last_session({"steps": 40}, [EPOCH, {"kind": "step", "step": 41}])
    assert state.describes_last_session({}, [])


PROGRAM = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
from hybrid_imagenet.runlog import run_dir
run = run_dir.RunDirectory(pathlib.Path(sys.argv[1]), resume=True)
print("held", flush=True)
signal.sigwait([signal.SIGTERM])
"""


def test_stop_signals_the_process_that_holds_the_lock(tmp_path):
    with pytest.raises(UserError, match="is not running on this host"):
        state.stop(tmp_path)
    process = python("-c", PROGRAM, tmp_path)
    assert process.stdout.readline() == "held\n"
    assert state.run_state(tmp_path, [EPOCH, DIVERGED], {"steps": 40}, "other") == state.RUNNING
    assert files.lock_holder(tmp_path) == f"{HERE} {process.pid}"
    # `lock_holder` did not take the lock.
    with pytest.raises(UserError, match="in use by another run"):
        run_dir.RunDirectory(tmp_path, resume=True)
    (tmp_path / "lock").write_text("elsewhere 17\n")
    with pytest.raises(UserError, match=r"running on elsewhere\. Stop it there with kill -TERM 17"):
        state.stop(tmp_path)
    # In a container the number in the lock may belong to another process.
    (tmp_path / "lock").write_text(f"{HERE} {os.getpid()}\n")
    with pytest.raises(UserError, match="cannot be signaled"):
        state.stop(tmp_path)
    (tmp_path / "lock").write_text(f"{HERE} {process.pid}\n")
    state.stop(tmp_path)
    assert process.wait(20) == 0
    assert files.lock_holder(tmp_path) is None
