import json

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from studies import running, trial_runs
from tests.studies.support import ended, finish

FLAGS = ("--dataset=digits", "--model=resnet10", "--epochs=4", "--seed=1")


class Runner:
    """Stands for the training program: notes what it was asked for and leaves what it was told."""

    def __init__(self, code=0, accuracies=(0.5, 0.9), loss=0.5):
        self.code, self.accuracies, self.loss = code, list(accuracies), loss
        self.commands = []

    def __call__(self, cell, arguments):
        self.commands.append(list(arguments))
        assert not cell.run_dir.exists()  # nothing is left of an earlier run
        if self.accuracies:
            finish(cell, self.accuracies, self.loss)
        cell.output.write_text(
            "step 1\nerror: something is wrong\nmpirun: bye\n" if self.code else "done\n"
        )
        return self.code


@pytest.fixture
def cell(tmp_path):
    return trial_runs.create(tmp_path, FLAGS, 2)


def test_a_cell_is_named_after_the_values_of_its_flags(tmp_path, cell):
    same = trial_runs.create(
        tmp_path,
        ["--seed=1", "--epochs=9", "--model=resnet10", "--dataset", "digits", "--epochs=4"],
        2,
    )
    assert same.directory == cell.directory
    spelled = trial_runs.create(
        tmp_path, [*FLAGS, "--momentum=0.9", "--run_dir=/elsewhere"], 2
    )  # the default
    assert spelled.directory == cell.directory
    watched = trial_runs.create(
        tmp_path, [*FLAGS, "--tensorboard", "--keep_checkpoints=5", "--profile_steps=2,3"], 2
    )
    assert watched.directory == cell.directory
    others = [
        trial_runs.create(tmp_path, [*FLAGS, "--momentum=0.8"], 2),
        trial_runs.create(tmp_path, [*FLAGS, "--seed=2"], 2),
        trial_runs.create(tmp_path, FLAGS, 4),
    ]
    assert len({c.directory for c in [cell, *others]}) == 4


def test_a_finished_cell_is_kept(cell):
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
def test_a_broken_or_unfinished_cell_is_run_again(cell, damage):
    running.ensure(cell, Runner(accuracies=[0.1]))
    damage(cell)
    assert trial_runs.read(cell).status == trial_runs.MISSING
    result, ran = running.ensure(cell, Runner(accuracies=[0.8]))
    assert ran
    assert result.summary["val_top1"] == 0.8


def test_a_failed_cell_says_why_and_is_tried_again(cell):
    result, ran = running.ensure(cell, Runner(code=1, accuracies=()))
    assert ran
    assert result.status == trial_runs.FAILED
    assert result.reason == "exit code 1: error: something is wrong"
    assert trial_runs.read(cell) == result
    result, ran = running.ensure(cell, Runner())
    assert ran
    assert result.status == trial_runs.FINISHED


@pytest.mark.parametrize(("code", "loss"), [(3, 0.5), (0, None), (0, float("nan"))])
def test_a_diverged_cell_is_kept_as_such(cell, code, loss):
    result, _ = running.ensure(cell, Runner(code=code, loss=loss))
    assert result.status == trial_runs.DIVERGED
    assert result.reason
    assert running.ensure(cell, Runner()) == (result, False)


def test_a_cell_that_runs_now_is_left_alone(cell):
    running.ensure(cell, Runner(code=75, accuracies=()))
    cell.run_dir.mkdir()
    with files.lock(cell.run_dir), pytest.raises(UserError, match="the same study runs now"):
        running.ensure(cell, Runner())
    assert cell.run_dir.exists()
    assert running.ensure(cell, Runner())[1]


def test_foreign_files_are_left_alone(cell):
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        running.ensure(cell, Runner())
    assert (cell.run_dir / "thesis.txt").exists()
