"""Tests the cells of a study, which are training runs with fixed flags."""

import json

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from studies import running, trial_runs
from tests.studies.support import ended, finish

FLAGS = ("--dataset=digits", "--model=resnet10", "--epochs=4", "--seed=1")


class Runner:
    """Replaces the training program: records its arguments and writes the files of a run."""

    def __init__(self, code=0, accuracies=(0.5, 0.9), loss=0.5):
        self.code = code
        self.accuracies = list(accuracies)
        self.loss = loss
        self.commands = []

    def __call__(self, cell, arguments):
        self.commands.append(list(arguments))
        # The files of an earlier run must have been removed.
        assert not cell.run_dir.exists()
        if self.accuracies:
            finish(cell, self.accuracies, self.loss)
        cell.output.write_text(
            "step 1\nerror: something is wrong\nmpirun: bye\n" if self.code else "done\n"
        )
        return self.code


@pytest.fixture
def cell(tmp_path):
    return trial_runs.create(tmp_path, FLAGS, 2)


def test_create_names_a_cell_after_the_values_of_its_flags(tmp_path, cell):
    same = trial_runs.create(
        tmp_path,
        ["--seed=1", "--epochs=9", "--model=resnet10", "--dataset", "digits", "--epochs=4"],
        2,
    )
    assert same.directory == cell.directory
    # 0.9 is the default.
    with_default = trial_runs.create(
        tmp_path, [*FLAGS, "--momentum=0.9", "--run_dir=/elsewhere"], 2
    )
    assert with_default.directory == cell.directory
    with_logs = trial_runs.create(
        tmp_path, [*FLAGS, "--tensorboard", "--keep_checkpoints=5", "--profile_steps=2,3"], 2
    )
    assert with_logs.directory == cell.directory
    others = [
        trial_runs.create(tmp_path, [*FLAGS, "--momentum=0.8"], 2),
        trial_runs.create(tmp_path, [*FLAGS, "--seed=2"], 2),
        trial_runs.create(tmp_path, FLAGS, 4),
    ]
    assert len({c.directory for c in [cell, *others]}) == 4


def test_ensure_of_a_finished_cell_does_not_run_it_again(cell):
    runner = Runner()
    result, ran = running.ensure(cell, runner)
    assert ran
    assert (result.status, result.summary["val_top1"]) == (trial_runs.FINISHED, 0.9)
    assert [record["val_top1"] for record in result.epochs] == [0.5, 0.9]
    assert result.facts["train_images"] == 1500
    again, ran = running.ensure(cell, runner)
    assert not ran
    assert again == result
    assert len(runner.commands) == 1
    assert runner.commands[0][-1] == f"--run_dir={cell.run_dir}"
    assert list(cell.flags) == runner.commands[0][-1 - len(FLAGS) : -1]


def _other_flags(cell):
    path = cell.run_dir / "config.json"
    content = json.loads(path.read_text())
    content["flags"]["momentum"] = 0.5
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda cell: (cell.run_dir / "summary.json").unlink(),
        lambda cell: cell.marker.write_text("{"),
        _other_flags,
        lambda cell: ended(cell, 75),
    ],
    ids=["no summary", "torn marker", "other flags", "preempted"],
)
def test_ensure_of_a_damaged_or_unfinished_cell_runs_it_again(cell, damage):
    running.ensure(cell, Runner(accuracies=[0.1]))
    damage(cell)
    assert trial_runs.read(cell).status == trial_runs.MISSING
    result, ran = running.ensure(cell, Runner(accuracies=[0.8]))
    assert ran
    assert result.summary["val_top1"] == 0.8


def test_ensure_of_a_failed_cell_has_the_reason_and_runs_it_again(cell):
    result, ran = running.ensure(cell, Runner(code=1, accuracies=()))
    assert ran
    assert result.status == trial_runs.FAILED
    assert result.reason == "exit code 1: error: something is wrong"
    assert trial_runs.read(cell) == result
    result, ran = running.ensure(cell, Runner())
    assert ran
    assert result.status == trial_runs.FINISHED


@pytest.mark.parametrize(("code", "loss"), [(3, 0.5), (0, None), (0, float("nan"))])
def test_ensure_of_a_diverged_cell_does_not_run_it_again(cell, code, loss):
    result, _ = running.ensure(cell, Runner(code=code, loss=loss))
    assert result.status == trial_runs.DIVERGED
    assert result.reason
    assert running.ensure(cell, Runner()) == (result, False)


def test_ensure_of_a_running_cell_raises(cell):
    running.ensure(cell, Runner(code=75, accuracies=()))
    cell.run_dir.mkdir()
    with files.lock(cell.run_dir), pytest.raises(UserError, match="the same study runs now"):
        running.ensure(cell, Runner())
    assert cell.run_dir.exists()
    assert running.ensure(cell, Runner())[1]


def test_ensure_of_a_cell_with_other_files_raises(cell):
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        running.ensure(cell, Runner())
    assert (cell.run_dir / "thesis.txt").exists()
