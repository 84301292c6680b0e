"""A `fit` with `Checkpoint` that is preempted or killed inside an epoch continues exactly."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from hybrid_imagenet.errors import EXIT_PREEMPTED, UserError
from hybrid_imagenet.resilience import step_requests
from tests import ranks
from tests.library import preempted
from tests.ranks import ROOT, environment
from tests.support import program

RUN = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2"]
BATCHES = preempted.EXAMPLES // preempted.BATCH


def assert_equal(ours, expected):
    """Compares variables, and the logs of the epochs that both have recorded."""
    for value, other in zip(ours[0], expected[0], strict=True):
        np.testing.assert_array_equal(value, other)
    assert ours[1] == {epoch: expected[1][epoch] for epoch in ours[1]}


@pytest.mark.parametrize("kind", preempted.KINDS)
def test_preempted_fit_continues_with_the_next_batch(kind, tmp_path, capsys):
    # With `steps_per_execution=2`, callbacks count pairs of batches.
    middle = BATCHES // 4 if kind == "executions" else BATCHES // 2
    whole = preempted.fit(kind, tmp_path / "whole")
    preempted.fit_preempted(kind, tmp_path / "again", middle)
    preempted.fit_preempted(kind, tmp_path / "again", 2 * middle)
    again = preempted.fit(kind, tmp_path / "again")
    assert_equal(again, whole)
    assert list(again[1]) == [1, 2]
    assert "within epoch 2" in capsys.readouterr().err


def test_preempted_fit_on_a_last_batch_saves_after_the_epoch(tmp_path):
    whole = preempted.fit("arrays", tmp_path / "whole")
    preempted.fit_preempted("arrays", tmp_path / "again", BATCHES, every_epochs=3)
    again = preempted.fit("arrays", tmp_path / "again", every_epochs=3)
    assert_equal(again, whole)
    assert list(again[1]) == [1, 2]


def test_request_that_comes_too_late_for_a_fit_stops_the_next_one(tmp_path, monkeypatch):
    # It is set back after the test.
    monkeypatch.setattr(preempted.REQUESTS, "stop", False)
    preempted.fit("arrays", tmp_path / "first", preempted.EPOCHS * BATCHES, preempted.ask_to_stop)
    with pytest.raises(SystemExit, match=str(EXIT_PREEMPTED)):
        preempted.fit("arrays", tmp_path / "second")
    preempted.REQUESTS.end()
    assert len(list((tmp_path / "second").glob("step-*.npz"))) == 1


def test_checkpoints_by_time_do_not_change_the_result(tmp_path):
    whole = preempted.fit("arrays", tmp_path / "whole")
    often = preempted.fit("arrays", tmp_path / "often", every_seconds=1e-9, keep=100)
    assert_equal(often, whole)
    assert len(list((tmp_path / "often").glob("step-*.npz"))) == preempted.EPOCHS * BATCHES


def test_data_without_a_known_order_begin_the_epoch_again_with_a_line(tmp_path, capsys):
    whole = preempted.fit("tf.data", tmp_path / "whole")
    preempted.fit_preempted("tf.data", tmp_path / "again", 10)
    preempted.fit("tf.data", tmp_path / "again")
    assert (
        "epoch 1 begins again, because the order of its data is not known (see skip_batches): its"
        " first 10 batches are trained a second time" in capsys.readouterr().err
    )
    preempted.fit_preempted("tf.data", tmp_path / "skipped", 10)
    skipped = preempted.fit("tf.data", tmp_path / "skipped", skip_batches=True)
    assert_equal(skipped, whole)


def test_skipped_batches_of_data_of_unknown_length_come_again_in_later_epochs(tmp_path):
    whole = preempted.fit("unknown length", tmp_path / "whole")
    preempted.fit_preempted("unknown length", tmp_path / "again", 10)
    again = preempted.fit("unknown length", tmp_path / "again", skip_batches=True)
    assert_equal(again, whole)


@pytest.mark.parametrize("kind", ["steps_per_epoch", "own order"])
def test_data_whose_epochs_may_differ_begin_the_epoch_again(kind, tmp_path, capsys):
    preempted.fit_preempted(kind, tmp_path / "again", 10)
    skips = {"skip_batches": True} if kind == "steps_per_epoch" else {}
    _, logs = preempted.fit(kind, tmp_path / "again", **skips)
    assert list(logs) == [0, 1, 2]
    assert "epoch 1 begins again, because the order" in capsys.readouterr().err


def test_data_of_steps_per_epoch_begin_again_after_an_epoch_with_a_line(tmp_path, capsys):
    preempted.fit("steps_per_epoch", tmp_path / "again", epochs=1)
    assert "begin again" not in capsys.readouterr().err
    preempted.fit("steps_per_epoch", tmp_path / "again")
    assert (
        "with steps_per_epoch, the data continue over epochs; they begin again with their first"
        " batch" in capsys.readouterr().err
    )


def test_another_batch_size_begins_the_epoch_again(tmp_path, capsys):
    preempted.fit_preempted("arrays", tmp_path / "again", 10)
    preempted.fit("arrays", tmp_path / "again", batch_size=2 * preempted.BATCH)
    assert "because the size or number of its batches has changed" in capsys.readouterr().err


def test_checkpoint_requested_in_a_last_batch_is_saved_after_the_epoch(tmp_path):
    clock = iter(range(10**6))
    with mock.patch.object(step_requests.time, "monotonic", lambda: next(clock)):
        preempted.fit(
            "arrays", tmp_path / "a", epochs=2, every_epochs=100, every_seconds=BATCHES, keep=9
        )
    steps = sorted(int(path.stem[5:]) for path in (tmp_path / "a").glob("step-*.npz"))
    assert steps == [BATCHES, 2 * BATCHES]


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_every_seconds_that_is_not_positive_is_rejected(seconds, tmp_path):
    with pytest.raises(UserError, match=r"every_seconds=\S+ must be more than 0, or None"):
        preempted.hi.callbacks.Checkpoint(tmp_path, every_seconds=seconds)


def job(kind, folder, **variables):
    """Runs a job of two ranks to its end."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [*RUN, f"--engine={program.ENGINE}", "tests/library/preempted.py", kind, str(folder)],
        env=environment() | {name: str(value) for name, value in variables.items()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def final(folder):
    with np.load(folder / "final.npz") as values:
        return [values[name] for name in values.files]


def assert_continues(kind, folder, whole, *moments):
    """Preempts or kills a job at several moments and compares its end with that of `whole`.

    Args:
      kind: Kind of data.
      folder: Directory of the job.
      whole: Directory of a job that has trained without interruption.
      *moments: For each start, the environment variables that say when it gets which signal.
    """
    for moment in moments:
        done = job(kind, folder, EVERY=0.01, **moment)
        name = moment["SIGNAL"]
        if name == "SIGKILL":
            assert done.returncode not in (0, EXIT_PREEMPTED), done.stderr
        else:
            assert done.returncode == EXIT_PREEMPTED, done.stderr
            assert "Start the same command again" in done.stderr
    done = job(kind, folder)
    assert done.returncode == 0, done.stderr
    for ours, expected in zip(final(folder), final(whole), strict=True):
        np.testing.assert_array_equal(ours, expected)


def random_moments(kind, number):
    """Returns four moments that come before the last batch, if each start continues exactly."""
    random = np.random.default_rng([len(kind), number])
    return [
        {
            "SIGNAL": name,
            "AT": random.integers(1, 6),
            "LATER": round(random.uniform(0, 0.03), 4),
        }
        for name in ("SIGKILL", "SIGTERM", "SIGTERM", "SIGKILL")
    ]


@pytest.mark.parametrize("kind", ["arrays", "pydataset", "order", "accumulation"])
def test_two_ranks_continue_after_a_request_to_one_of_them(kind, pools, tmp_path):
    results = pools[2].call(preempted.compare_on_ranks, kind, str(tmp_path))
    assert results == [{"equal": True, "logs": True}] * 2


def test_states_of_layers_continue_on_each_rank(pools, tmp_path):
    results = pools[2].call(preempted.compare_states_on_ranks, str(tmp_path))
    assert results == [[True, True]] * 2


def test_checkpoint_that_is_used_again_forgets_the_values_of_an_interrupted_fit(pools, tmp_path):
    results = pools[2].call(preempted.interrupted_then_earlier_checkpoint, str(tmp_path))
    assert results == [[1, 2]] * 2


def test_exact_order_continues_on_more_ranks_with_the_examples_that_are_left(pools, tmp_path):
    folder = str(tmp_path / "checkpoints")
    # The other 72 examples fill the batches of three ranks, so none comes from the next epoch.
    first = pools[2].call(preempted.examples_trained, folder, 6)
    assert sum(map(len, first)) == 6 * 2 * preempted.BATCH
    with ranks.own(3) as pool:
        second = pool.call(preempted.examples_trained, folder, 0)
    examples = [example for rank in (*first, *second) for example in rank]
    assert sorted(examples) == list(range(preempted.EXAMPLES))


def test_job_of_two_ranks_continues_after_a_signal_to_one_and_a_kill(tmp_path):
    done = job("arrays", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    moments = [{"SIGNAL": "SIGTERM", "AT": 5}, {"SIGNAL": "SIGKILL", "AT": 8}]
    assert_continues("arrays", tmp_path / "again", tmp_path / "whole", *moments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "pydataset", "order"])
def test_job_of_two_ranks_continues_at_twenty_random_moments(kind, tmp_path):
    done = job(kind, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    for number in range(5):
        moments = random_moments(kind, number)
        assert_continues(kind, tmp_path / f"again{number}", tmp_path / "whole", *moments)
