"""Tests jobs that start again after a loss: on which hosts, how often, and from which step."""

import fcntl
import json
import shutil
import threading
import time

import pytest

from hybrid_imagenet import startup
from hybrid_imagenet.resilience import restarts
from hybrid_imagenet.resilience.restarts import RestartLoop, RestartPolicy


class Job:
    """Replaces a supervisor: writes a record and a checkpoint, then ends as the test specifies."""

    def __init__(self, end, run_dir):
        self._end = end
        self._run_dir = run_dir
        self.has_failed = False
        self.stopped = threading.Event()

    def run(self):
        code, step, saved = self._end
        (self._run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self._run_dir / "config.json").write_text("{}")
        # The last line is cut short, as after a kill, and the next attempt begins a new one.
        with (self._run_dir / "metrics.jsonl").open("a") as file:
            file.write("\n" + json.dumps({"kind": "step", "step": step}) + '\n{"kind": "st')
        if saved is not None:
            (self._run_dir / "checkpoints" / f"step-{saved:09d}.npz").touch()
        if code == "raises":
            self.has_failed = True
            return 1
        if code == "waits":
            assert self.stopped.wait(10)
            return 75
        return code

    def ask_to_stop(self, why):
        self.why = why
        self.stopped.set()


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch):
    monkeypatch.setattr(restarts, "_CHECK_SECONDS", 0.01)
    monkeypatch.setenv(restarts.COMMAND_START_VARIABLE, "0")


def play(tmp_path, ends, *, hosts=None, keeps=True, **policy):
    """Runs attempts; returns the exit code, and the hosts, ranks and resume of each attempt.

    Each of `ends` has the exit code, the step of the last record, and the step of the latest
    checkpoint.
    """
    started = []
    remaining = list(ends)
    run_dir = tmp_path / "run"
    slots = hosts or (lambda: {"a": 2, "b": 2})

    def start(hosts_of_attempt, ranks, resume):
        started.append((dict(hosts_of_attempt), ranks, resume))
        return Job(remaining.pop(0), run_dir)

    default_policy = {
        "max_restarts": 3,
        "min_ranks": 1,
        "max_ranks": 4,
        "wait_seconds": 0.2,
        "join_seconds": 0.05,
    }
    restart_policy = RestartPolicy(**(default_policy | policy))
    loop = RestartLoop(restart_policy, slots, start, run_dir if keeps else None)
    return loop.run(), started


def hosts_with_a_later_one(tmp_path):
    """Returns a function that returns the hosts: a, and b as soon as the run has begun."""
    return lambda: {"a": 2, "b": 2} if (tmp_path / "run" / "config.json").exists() else {"a": 2}


def test_restart_after_a_lost_rank_continues_from_the_checkpoint(tmp_path, capfd):
    # The variable has a resolution of a hundredth of a second.
    began = startup.clock() - 0.01
    code, started = play(tmp_path, [(137, 40, 20), (4, 90, 80), (0, 120, 120)])
    assert code == 0
    # Each attempt records its own start.
    assert startup.command_start(startup.clock()) >= began
    assert [(ranks, resume) for _, ranks, resume in started] == [(4, False), (4, True), (4, True)]
    errors = capfd.readouterr().err
    assert "restart 1 of 3 (exit code 137), from the checkpoint of step 20" in errors
    assert "restart 2 of 3 (exit code 4), from the checkpoint of step 80" in errors


@pytest.mark.parametrize("code", [0, 2, 3, 75, 130])
def test_restart_does_not_happen_after_a_final_exit_code(tmp_path, code):
    assert play(tmp_path, [(code, 10, 10)]) == (code, [({"a": 2, "b": 2}, 4, False)])


def test_restart_does_not_happen_after_a_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts.REQUESTS, "stop", True)
    for end in ((143, 10, 5), (137, 10, 5)):
        code, started = play(tmp_path / str(end[0]), [end])
        assert (code, len(started)) == (end[0], 1)
    # The signal arrives while the job waits for hosts.
    assert play(tmp_path, [], hosts=lambda: {"a": 1}, min_ranks=3, wait_seconds=100) == (75, [])


def test_restart_that_waits_for_a_locked_run_ends_after_a_signal(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("wb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        request = threading.Timer(0.3, lambda: monkeypatch.setattr(restarts.REQUESTS, "stop", True))
        request.start()
        code, started = play(tmp_path, [(137, 1, -1), (75, 1, 1)], wait_seconds=100.0)
        assert (code, len(started)) == (75, 1)
        request.join()


def test_restart_loop_does_not_resume_an_existing_run_at_first(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    _, started = play(tmp_path, [(2, 0, 0)])
    assert [resume for *_, resume in started] == [False]


def test_restarts_end_after_max_restarts(tmp_path):
    code, started = play(tmp_path, [(137, 10, 5), (137, 20, 15), (137, 30, 25)], max_restarts=2)
    assert (code, len(started)) == (137, 3)


@pytest.mark.parametrize("code", [1, 137])
def test_restarts_end_if_the_same_step_fails_three_times(tmp_path, code, capfd):
    ends = [(code, 50, 40), (code, 50, 40), (code, 50, 40)]
    result, started = play(tmp_path, ends, max_restarts=9)
    assert (result, len(started)) == (code, 3)
    assert "failed 3 times in a row after the record of step 50" in capfd.readouterr().err


def test_restarts_continue_after_losses_that_are_unrelated(tmp_path):
    # Losses at steps 57 and 53 look the same if every tenth step has a record.
    ends = [(137, 50, 40), (137, 50, 40), (137, 90, 40), (137, 50, 40), (0, 120, 120)]
    code, started = play(tmp_path, ends, max_restarts=9)
    assert (code, len(started)) == (0, 5)
    # A new checkpoint shows that the job advances.
    ends = [(137, 50, 40), (137, 50, 40), (137, 50, 45), (137, 50, 45), (0, 60, 60)]
    code, started = play(tmp_path / "saved", ends, max_restarts=9)
    assert (code, len(started)) == (0, 5)
    # If a rank is killed before the run has advanced, the step is not the cause.
    ends = [(137, 40, 40), (137, 40, 40), (137, 40, 40), (0, 60, 60)]
    code, started = play(tmp_path / "killed", ends)
    assert (code, len(started)) == (0, 4)
    # Nothing is known about the steps of a program that stores its state elsewhere.
    ends = [(1, 40, 40), (1, 40, 40), (1, 40, 40), (0, 60, 60)]
    code, started = play(tmp_path / "own", ends, keeps=False)
    assert (code, len(started)) == (0, 4)


def test_restart_does_not_happen_after_an_exception_of_a_script(tmp_path, capfd):
    code, started = play(tmp_path / "script", [("raises", 10, 10)], keeps=False)
    assert (code, len(started)) == (1, 1)
    assert "does not start again, because its program itself has failed" in capfd.readouterr().err
    # The steps of the training program show whether it would fail again.
    code, started = play(tmp_path / "program", [("raises", 10, 10), (0, 60, 60)])
    assert (code, len(started)) == (0, 2)


def test_restart_after_a_lost_host_uses_the_others(tmp_path):
    host_lists = iter([{"a": 2, "b": 2}, {"a": 2}])
    code, started = play(
        tmp_path, [(4, 40, 20), (0, 60, 60)], hosts=lambda: next(host_lists, {"a": 2}), max_ranks=4
    )
    assert (code, started[1]) == (0, ({"a": 2}, 2, True))


def test_restart_excludes_a_host_on_which_the_job_cannot_start(tmp_path, capfd):
    host_lists = iter([{"a": 2}, {"a": 2, "b": 2}])
    ends = [(4, 40, 20), (2, 40, 20), (0, 60, 60)]
    code, started = play(
        tmp_path, ends, hosts=lambda: next(host_lists, {"a": 2, "b": 2}), max_ranks=4
    )
    assert (code, [set(slots) for slots, *_ in started]) == (0, [{"a"}, {"a", "b"}, {"a"}])
    assert [resume for *_, resume in started] == [False, True, True]
    assert "continuing without b, where the job could not start" in capfd.readouterr().err


def test_restart_without_a_joined_host_that_cannot_start_resumes_on_the_others(tmp_path):
    code, started = play(
        tmp_path,
        [("waits", 30, 20), (2, 30, 20), (0, 60, 60)],
        hosts=hosts_with_a_later_one(tmp_path),
        max_restarts=0,
    )
    assert (code, [(ranks, resume) for _, ranks, resume in started]) == (
        0,
        [(2, False), (4, True), (2, True)],
    )


def test_restart_without_enough_hosts_waits_and_then_exits_with_4(tmp_path, capfd):
    assert play(tmp_path, [], hosts=lambda: {"a": 1}, min_ranks=3) == (4, [])
    errors = capfd.readouterr().err
    assert "waiting for hosts: 1 slot available" in errors
    assert "only 1 slot after 0.2 s (--min_np=3)" in errors


def test_restart_on_joined_hosts_happens_after_a_save_and_is_not_counted(tmp_path):
    began = time.monotonic()
    code, started = play(
        tmp_path,
        [("waits", 30, 20), (0, 60, 60)],
        hosts=hosts_with_a_later_one(tmp_path),
        max_restarts=0,
        join_seconds=0.3,
    )
    # Joined hosts are not used at once, but after the join interval.
    assert time.monotonic() - began >= 0.3
    assert (code, [ranks for _, ranks, _ in started]) == (0, [2, 4])


def test_restart_on_joined_hosts_does_not_happen_with_max_ranks(tmp_path):
    code, started = play(tmp_path, [(0, 30, 20)], max_ranks=2, join_seconds=0.0)
    assert (code, started[0][1]) == (0, 2)


def test_restart_waits_until_the_earlier_attempt_has_unlocked_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("wb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        release.start()
        began = time.monotonic()
        # Only an attempt after the first one waits.
        code, started = play(tmp_path, [(137, 1, 1), (0, 2, 2)], wait_seconds=5.0)
        assert (code, [resume for *_, resume in started]) == (0, [False, True])
        assert time.monotonic() - began >= 0.25
        release.join()


def test_restart_continues_a_run_that_only_the_host_of_rank_0_sees(tmp_path):
    def hosts():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return {"a": 2}

    code, started = play(tmp_path, [(137, 40, 20), (0, 60, 60)], hosts=hosts)
    assert (code, [resume for _, _, resume in started]) == (0, [False, True])
