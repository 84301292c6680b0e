"""Jobs that start again after a loss: on which hosts, how often, and from which step."""

import fcntl
import json
import threading
import time

import pytest

from hybrid_imagenet import startup
from hybrid_imagenet.resilience import restarts
from hybrid_imagenet.resilience.restarts import RestartLoop, RestartPolicy


class Job:
    """Replaces a supervisor: writes a record and a checkpoint, then ends as the test says."""

    def __init__(self, end, run_dir):
        self._end = end
        self._run_dir = run_dir
        self.stopped = threading.Event()

    def run(self):
        code, step, saved = self._end
        (self._run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self._run_dir / "config.json").write_text("{}")
        with (self._run_dir / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"kind": "step", "step": step}) + '\n{"kind": "st'
            )  # the last line was cut short
        if saved is not None:
            (self._run_dir / "checkpoints" / f"step-{saved:09d}.npz").touch()
        if code == "waits":
            assert self.stopped.wait(10)
            return 75
        return code

    def ask_to_stop(self, why):
        self.why = why
        self.stopped.set()


@pytest.fixture(autouse=True)
def checks_often(monkeypatch):
    monkeypatch.setattr(restarts, "_CHECK_SECONDS", 0.01)
    monkeypatch.setenv(restarts.COMMAND_START_VARIABLE, "0")


def play(tmp_path, ends, *, hosts=None, keeps=True, **policy):
    """Runs attempts; returns the exit code, and what each of them was started with.

    Each of `ends` has the exit code, the step of the last record, and the step of the newest
    checkpoint.
    """
    started = []
    remaining = list(ends)
    run_dir = tmp_path / "run"
    slots = hosts or (lambda: {"a": 2, "b": 2})

    def start(where, ranks, resume):
        started.append((dict(where), ranks, resume))
        return Job(remaining.pop(0), run_dir)

    chosen = RestartPolicy(
        **(
            {
                "max_restarts": 3,
                "min_ranks": 1,
                "max_ranks": 4,
                "wait_seconds": 0.2,
                "join_seconds": 0.05,
            }
            | policy
        )
    )
    return RestartLoop(chosen, slots, start, run_dir if keeps else None).run(), started


def joined(tmp_path):
    """Returns the hosts: a, and b once the run has begun."""
    return lambda: {"a": 2, "b": 2} if (tmp_path / "run" / "config.json").exists() else {"a": 2}


def test_a_lost_rank_starts_the_job_again_from_its_checkpoint(tmp_path, capfd):
    began = startup.clock() - 0.01  # the variable holds hundredths of a second
    code, started = play(tmp_path, [(137, 40, 20), (4, 90, 80), (0, 120, 120)])
    assert code == 0
    assert startup.command_start(startup.clock()) >= began  # each attempt has its own start
    assert [(ranks, resume) for _, ranks, resume in started] == [(4, False), (4, True), (4, True)]
    errors = capfd.readouterr().err
    assert "restart 1 of 3 (exit code 137), from the checkpoint of step 20" in errors
    assert "restart 2 of 3 (exit code 4), from the checkpoint of step 80" in errors


@pytest.mark.parametrize("code", [0, 2, 3, 75, 130])
def test_a_code_that_another_start_would_not_change_is_final(tmp_path, code):
    assert play(tmp_path, [(code, 10, 10)]) == (code, [({"a": 2, "b": 2}, 4, False)])


def test_a_job_that_a_signal_has_stopped_does_not_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts.REQUESTS, "stop", True)
    for end in ((143, 10, 5), (137, 10, 5)):
        code, started = play(tmp_path / str(end[0]), [end])
        assert (code, len(started)) == (end[0], 1)
    assert play(tmp_path, [], hosts=lambda: {"a": 1}, min_ranks=3, wait_seconds=100) == (
        75,
        [],
    )  # while it waits for hosts


def test_a_signal_ends_the_wait_for_a_locked_run(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("wb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = threading.Timer(0.3, lambda: monkeypatch.setattr(restarts.REQUESTS, "stop", True))
        asked.start()
        code, started = play(tmp_path, [(137, 1, -1), (75, 1, 1)], wait_seconds=100.0)
        assert (code, len(started)) == (75, 2)
        asked.join()


def test_the_first_attempt_does_not_resume_an_existing_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    _, started = play(tmp_path, [(2, 0, 0)])
    assert [resume for *_, resume in started] == [False]


def test_a_job_ends_after_max_restarts(tmp_path):
    code, started = play(tmp_path, [(137, 10, 5), (137, 20, 15), (137, 30, 25)], max_restarts=2)
    assert (code, len(started)) == (137, 3)


def test_the_same_step_failing_twice_ends_the_job(tmp_path, capfd):
    code, started = play(tmp_path, [(1, 50, 40), (1, 50, 40)])
    assert (code, len(started)) == (1, 2)
    assert "failed at step 50 again" in capfd.readouterr().err
    # A rank killed twice before the run has trained beyond its checkpoint says nothing of the step.
    code, started = play(tmp_path / "other", [(137, 40, 40), (137, 40, 40), (0, 60, 60)])
    assert (code, len(started)) == (0, 3)
    # Nothing is known of the steps of a program that keeps its state elsewhere.
    code, started = play(tmp_path / "own", [(1, 40, 40), (1, 40, 40), (0, 60, 60)], keeps=False)
    assert (code, len(started)) == (0, 3)


def test_the_job_continues_on_the_remaining_hosts(tmp_path):
    looks = iter([{"a": 2, "b": 2}, {"a": 2}])
    code, started = play(
        tmp_path, [(4, 40, 20), (0, 60, 60)], hosts=lambda: next(looks, {"a": 2}), max_ranks=4
    )
    assert (code, started[1]) == (0, ({"a": 2}, 2, True))


def test_a_host_on_which_the_job_cannot_start_is_excluded(tmp_path, capfd):
    looks = iter([{"a": 2}, {"a": 2, "b": 2}])
    ends = [(4, 40, 20), (2, 40, 20), (0, 60, 60)]
    code, started = play(tmp_path, ends, hosts=lambda: next(looks, {"a": 2, "b": 2}), max_ranks=4)
    assert (code, [set(slots) for slots, *_ in started]) == (0, [{"a"}, {"a", "b"}, {"a"}])
    assert [resume for *_, resume in started] == [False, True, True]
    assert "continuing without b, where the job could not start" in capfd.readouterr().err


def test_a_joined_host_that_cannot_start_does_not_make_the_others_begin_again(tmp_path):
    code, started = play(
        tmp_path,
        [("waits", 30, 20), (2, 30, 20), (0, 60, 60)],
        hosts=joined(tmp_path),
        max_restarts=0,
    )
    assert (code, [(ranks, resume) for _, ranks, resume in started]) == (
        0,
        [(2, False), (4, True), (2, True)],
    )


def test_a_job_without_enough_hosts_waits_and_then_ends(tmp_path, capfd):
    assert play(tmp_path, [], hosts=lambda: {"a": 1}, min_ranks=3) == (4, [])
    errors = capfd.readouterr().err
    assert "waiting for hosts: 1 slot available" in errors
    assert "only 1 slot after 0.2 s (--min_np=3)" in errors


def test_hosts_that_join_end_an_attempt_after_it_has_saved_and_cost_no_restart(tmp_path):
    began = time.monotonic()
    code, started = play(
        tmp_path,
        [("waits", 30, 20), (0, 60, 60)],
        hosts=joined(tmp_path),
        max_restarts=0,
        join_seconds=0.3,
    )
    assert time.monotonic() - began >= 0.3  # not at each change
    assert (code, [ranks for _, ranks, _ in started]) == (0, [2, 4])


def test_a_job_with_max_ranks_is_not_ended_for_more_hosts(tmp_path):
    code, started = play(tmp_path, [(0, 30, 20)], max_ranks=2, join_seconds=0.0)
    assert (code, started[0][1]) == (0, 2)


def test_an_attempt_waits_until_the_earlier_one_has_unlocked_the_run(tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("wb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        release.start()
        began = time.monotonic()
        code, started = play(
            tmp_path, [(137, 1, 1), (0, 2, 2)], wait_seconds=5.0
        )  # the first does not wait for another run
        assert (code, [resume for *_, resume in started]) == (0, [False, True])
        assert time.monotonic() - began >= 0.25
        release.join()
