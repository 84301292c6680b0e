"""Tests which job `hybrid-imagenet demo` starts, and its output. The training is replaced."""

import os

import pytest

from hybrid_imagenet import __main__ as program
from hybrid_imagenet import config, demo
from hybrid_imagenet.errors import EXIT_NUMERICS, UserError


@pytest.fixture
def training(tmp_path, monkeypatch):
    """Changes to an empty directory and records the commands that would train."""
    commands = []

    def replacement(command_name):
        def main(arguments):
            commands.append([command_name, *arguments])
            return 0

        return main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(demo.run, "main", replacement("run"))
    monkeypatch.setattr(demo.training, "main", replacement("train"))
    monkeypatch.setattr(demo.mpirun, "find", lambda: None)
    return commands


def test_demo_trains_the_digits_on_two_cpu_ranks(training, capsys):
    assert program.main(["demo"]) == 0
    (command,) = training
    assert command[:4] == ["run", "-np", "2", "--"]
    resolved = config.resolve(command[4:], 2)
    assert (resolved.data.dataset, resolved.run.run_dir) == ("digits", "runs/demo")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    output = capsys.readouterr().out
    assert "--dataset=folder --data_dir=photos" in output
    assert "keras_fit.py . && hybrid-imagenet run -np 2 keras_fit.py" in output


def test_demo_quotes_the_path_of_the_example_for_the_shell(training, monkeypatch, tmp_path, capsys):
    examples = tmp_path / "my examples"
    monkeypatch.setattr(demo.files, "shipped_directory", lambda name: examples)
    assert program.main(["demo"]) == 0
    assert f"cp '{examples}/keras_fit.py' . && " in capsys.readouterr().out


def test_demo_chooses_a_new_directory_each_time(training, tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert program.main(["demo"]) == 0
    assert program.main(["demo", "--run-dir=mine"]) == 0
    assert [command[-1] for command in training] == ["--run_dir=runs/demo-2", "--run_dir=mine"]


def test_demo_without_mpirun_trains_on_one_rank_and_prints_the_reason(
    training, monkeypatch, capsys
):
    def find():
        raise UserError("There is no mpirun on PATH.")

    monkeypatch.setattr(demo.mpirun, "find", find)
    assert program.main(["demo"]) == 0
    (command,) = training
    assert command[0] == "train"
    assert config.resolve(command[1:]).data.dataset == "digits"
    output, error = capsys.readouterr()
    assert error == "training on one rank instead of two: There is no mpirun on PATH.\n"
    assert "keras_fit.py . && python keras_fit.py" in output


def test_demo_without_mpi4py_trains_on_one_rank(training, monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert program.main(["demo"]) == 0
    assert [command[0] for command in training] == ["train"]
    assert "mpi4py is not installed" in capsys.readouterr().err


def test_demo_that_fails_returns_the_exit_code_of_the_training(training, monkeypatch, capsys):
    monkeypatch.setattr(demo.run, "main", lambda arguments: EXIT_NUMERICS)
    assert program.main(["demo"]) == EXIT_NUMERICS
    assert capsys.readouterr().out == ""
