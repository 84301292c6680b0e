"""Tests the command line of `python -m benchmarks`, and of what has left `bench`."""

import contextlib
import pathlib
import re

import pytest

import benchmarks
from benchmarks import __main__ as command
from hybrid_imagenet.__main__ import main as program
from hybrid_imagenet.benchmarks.__main__ import BENCHMARKS, MOVED
from tests.ranks import ROOT


def test_list_of_benchmarks_names_every_one(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m benchmarks NAME")
    assert re.findall(r"^  (\w+)  ", text, re.M) == list(command.BENCHMARKS)


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_help_of_every_benchmark_names_its_command(name, capsys):
    with contextlib.suppress(SystemExit):
        command.main([name, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m benchmarks {name} ")
    assert "hybrid-imagenet bench" not in text or name.endswith("_peers")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stp", "There is no benchmark stp (did you mean step?). Choose one of step, peer, "),
        ("input_peers --peers=non", "there is no non. Choose from official, pillow, dali."),
        ("peer", "--peer=NAME is missing. See python -m benchmarks peer --help."),
        ("compare none none", "none cannot be read: No such file or directory. Pass a file"),
        ("compare file file", "file is not a JSON file. Pass a file that --json of a benchmark"),
    ],
)
def test_main_with_a_wrong_command_line_prints_one_line_with_a_remedy(
    line, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert command.main(line.split()) == 2
    output, error = capsys.readouterr()
    assert error.startswith("error: ") and message in error
    assert (output, error.count("\n")) == ("", 1)


def test_benchmarks_outside_the_package_are_those_that_bench_names():
    assert sorted(MOVED) == sorted(command.BENCHMARKS)
    assert not set(MOVED) & set(BENCHMARKS)
    assert pathlib.Path(benchmarks.__file__).parent == ROOT / "benchmarks"


@pytest.mark.parametrize(
    ("words", "name"),
    [*(([name, "--steps=1"], name) for name in MOVED), (["gpu", "--arms", "--minutes=3"], "arms")],
)
def test_bench_with_a_moved_benchmark_names_its_new_command(words, name, capsys):
    assert program(["bench", *words]) == 2
    output, error = capsys.readouterr()
    assert f"Run python -m benchmarks {name} in a checkout" in error
    assert (output, error.count("\n")) == ("", 1)
