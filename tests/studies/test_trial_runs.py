import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hybrid_imagenet import config
from hybrid_imagenet.errors import UserError
from studies import running, trial_runs
from tests.ranks import ROOT
from tests.studies.support import curve, ended, finish

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
        cell.output.write_text("step 1\nerror: something is wrong\nmpirun: bye\n" if self.code else "done\n")
        return self.code


@pytest.fixture
def cell(tmp_path):
    return trial_runs.create(tmp_path, FLAGS, 2)


def test_a_cell_is_named_after_the_values_of_its_flags(tmp_path, cell):
    same = trial_runs.create(
        tmp_path, ["--seed=1", "--epochs=9", "--model=resnet10", "--dataset", "digits", "--epochs=4"], 2
    )
    assert same.directory == cell.directory
    spelled = trial_runs.create(tmp_path, [*FLAGS, "--momentum=0.9", "--run_dir=/elsewhere"], 2)  # the default
    assert spelled.directory == cell.directory
    watched = trial_runs.create(tmp_path, [*FLAGS, "--tensorboard", "--keep_checkpoints=5", "--profile_steps=2,3"], 2)
    assert watched.directory == cell.directory
    others = [
        trial_runs.create(tmp_path, [*FLAGS, "--momentum=0.8"], 2),
        trial_runs.create(tmp_path, [*FLAGS, "--seed=2"], 2),
        trial_runs.create(tmp_path, FLAGS, 4),
    ]
    assert len({c.directory for c in [cell, *others]}) == 4


def test_a_default_that_has_changed_leaves_finished_cells_their_names():
    """LAMB's warmup began at 0.1 when cells were first named; those that set 0 must still be found."""
    lamb = [*FLAGS, "--optimizer=lamb"]
    assert trial_runs.resolved([*lamb, "--warmup_start_lr=0"])["warmup_start_lr"] == 0
    assert trial_runs.resolved(lamb) != trial_runs.resolved([*lamb, "--warmup_start_lr=0.1"])
    assert "warmup_start_lr" not in trial_runs.resolved([*FLAGS, "--optimizer=sgd"])


def test_a_wrong_flag_is_reported_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="initializer"):
        trial_runs.create(tmp_path, [*FLAGS, "--initializer=nonsense"], 2)


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


def _without_summary(cell):
    (cell.run_dir / "summary.json").unlink()


def _torn_summary(cell):
    (cell.run_dir / "summary.json").write_text('{"val_top1": 0.')


def _no_marker_code(cell):
    cell.marker.write_text(json.dumps({"flags": list(FLAGS), "ranks": 2}))


def _torn_marker(cell):
    cell.marker.write_text("{")


def _other_flags(cell):
    path = cell.run_dir / "config.json"
    content = json.loads(path.read_text())
    content["flags"]["momentum"] = 0.5
    path.write_text(json.dumps(content))


def _torn_records(cell):
    (cell.run_dir / "metrics.jsonl").write_text("no json\n{}\n")


def _preempted(cell):
    ended(cell, 75)


@pytest.mark.parametrize(
    "damage",
    [_without_summary, _torn_summary, _no_marker_code, _torn_marker, _other_flags, _torn_records, _preempted],
)
def test_a_broken_or_unfinished_cell_is_run_again(cell, damage):
    running.ensure(cell, Runner(accuracies=[0.1]))
    damage(cell)
    assert trial_runs.read(cell).status == trial_runs.MISSING
    result, ran = running.ensure(cell, Runner(accuracies=[0.8]))
    assert ran
    assert result.summary["val_top1"] == 0.8


def test_a_run_that_was_watched_otherwise_is_kept(cell):
    running.ensure(cell, Runner())
    path = cell.run_dir / "config.json"
    content = json.loads(path.read_text())
    content["flags"] |= {"keep_checkpoints": 9, "a_flag_of_former_times": 1}
    del content["flags"]["lr_decay"]
    path.write_text(json.dumps(content))
    assert trial_runs.read(cell).status == trial_runs.FINISHED


def test_watching_flags_exist():
    assert set(config.OPTIONS) >= trial_runs.WATCHING


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


def test_an_interrupted_cell_is_run_again(cell):
    def interrupted(cell, arguments):
        finish(cell, curve(0.3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.ensure(cell, interrupted)
    assert trial_runs.read(cell).status == trial_runs.MISSING
    assert running.ensure(cell, Runner())[1]


def test_foreign_files_are_left_alone(cell):
    cell.run_dir.mkdir(parents=True)
    (cell.run_dir / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        running.ensure(cell, Runner())
    assert (cell.run_dir / "thesis.txt").exists()


def test_an_out_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        running.ensure(trial_runs.create(tmp_path / "file", FLAGS, 2), Runner())


def test_commands(tmp_path, cell):
    alone = running.command(trial_runs.create(tmp_path, FLAGS, 1))
    assert alone[:3] == [sys.executable, "-m", "hybrid_imagenet.main"]
    both = [running.command(cell, launcher) for launcher in running.LAUNCHERS]
    for command, launcher in zip(both, running.LAUNCHERS, strict=True):
        assert command[0].endswith(launcher)
        at = command.index("-np")
        assert command[at : at + 5] == ["-np", "2", *alone[:3]]


def test_a_process_that_runs_to_its_end_and_one_that_cannot_start(cell):
    cell.directory.mkdir(parents=True)
    code = running.run_process(cell, [sys.executable, "-c", "print('here'); raise SystemExit(5)"])
    assert (code, cell.output.read_text()) == (5, "here\n")
    with pytest.raises(UserError, match="/no/such: No such file"):
        running.run_process(cell, ["/no/such"])


def test_an_interrupt_ends_the_processes(tmp_path, cell):
    """Ctrl-C in the middle of a run: the child is gone, and its own child too."""
    cell.directory.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.studies.interrupted", str(cell.directory)]
    process = subprocess.Popen(command, cwd=ROOT)
    while not (cell.output.exists() and cell.output.read_text().endswith("\n")):
        assert process.poll() is None
    process.send_signal(2)
    assert process.wait(120) == 7
    inner = int(cell.output.read_text())
    for _ in range(600):  # what was killed may take a while to go on a busy machine
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(inner)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {inner} is left in state {state}")


def test_an_interrupt_while_a_process_starts_is_kept_until_it_can_be_ended():
    seen = []
    with pytest.raises(KeyboardInterrupt), running.held_back():
        signal.raise_signal(signal.SIGINT)
        seen.append("still here")
    assert seen == ["still here"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_which_images_were_right_is_read_where_a_run_kept_it(tmp_path):
    cell = trial_runs.create(tmp_path, FLAGS, 2)
    finish(cell, [0.5, 0.75])
    ended(cell)
    assert trial_runs.read(cell).right is None
    np.save(cell.run_dir / "image_results.npy", np.array([True, False, True, True]))
    assert trial_runs.read(cell).right.tolist() == [True, False, True, True]
    (cell.run_dir / "image_results.npy").write_bytes(b"damaged")
    assert trial_runs.read(cell).right is None
