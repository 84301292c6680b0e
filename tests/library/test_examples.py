"""The examples and the code of README run on two ranks as they are, and reach their accuracy."""

import contextlib
import io
import json
import pathlib
import re
import runpy
import shlex
import sys
from unittest import mock

import keras
import pytest

from hybrid_imagenet.commands.run import split_command
from tests.library import programs

ROOT = pathlib.Path(__file__).parents[2]


def run(path: str, arguments: list, folder: str) -> str:
    """Runs a file as a program in a folder; returns its output."""
    output = io.StringIO()
    with (
        programs.ranks(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
    ):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [path, *arguments])
        keras.utils.set_random_seed(5)
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()


def accuracy(output, name="accuracy"):
    return float(re.findall(rf"\b{name}: ([\d.]+)", output)[-1])


def test_readme_difference_trains_and_saves_on_two_ranks(pools, tmp_path):
    (difference,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = difference.splitlines()
    assert {line[:2] for line in lines} == {"+ ", "- ", "  ", ""}
    text = "\n".join(line[2:] for line in lines if not line.startswith("-"))
    train_on_two_ranks(pools, text, tmp_path)


def test_first_program_of_the_library_page_trains_and_saves_on_two_ranks(pools, tmp_path):
    first, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.S)
    train_on_two_ranks(pools, first, tmp_path)
    assert (tmp_path / "digits.keras").exists()


def train_on_two_ranks(pools, text, folder):
    """Runs a program that trains on the digits, and checks its accuracy and its checkpoints."""
    path = folder / "lines.py"
    path.write_text(text)
    first, second = pools[2].call(run, str(path), [], str(folder))
    assert accuracy(first) > 0.9
    # Only rank 0 shows progress.
    assert not second
    assert list((folder / "checkpoints").glob("step-*.npz"))


@pytest.mark.slow
def test_examples_train_on_two_ranks(pools, tmp_path):
    def example(name, *arguments):
        return pools[2].call(run, str(ROOT / "examples" / name), list(arguments), str(tmp_path))[0]

    assert (
        accuracy(example("keras_fit.py", "--epochs=4", "--save=digits.keras"), "val_accuracy") > 0.8
    )
    tuned = example("fine_tune.py", "digits.keras", "--epochs=1")
    assert "head: 2 variables trained" in tuned and "all: 8 variables trained" in tuned
    assert accuracy(tuned) > 0.75
    assert accuracy(tuned, "accuracy on test images") > 0.75
    hybrid = example("fit_hybrid.py", "--epochs=5")
    assert accuracy(hybrid, "accuracy on held-out images") > 0.85
    looped = example("custom_loop.py", "--steps=61")
    losses = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", looped, re.M)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert re.search(r"last loss over 2 ranks: [\d.]+", looped)


@pytest.mark.slow
def test_notebook_trains_in_its_process_and_then_on_two_ranks(pools, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pyplot = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "matplotlib", mock.MagicMock(pyplot=pyplot))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    cells = json.loads((ROOT / "examples" / "digits.ipynb").read_text())["cells"]
    outputs_on_ranks = []
    variables = {}
    with programs.ranks():
        for cell in cells:
            source = "".join(cell["source"])
            if cell["cell_type"] != "code":
                continue
            if source.startswith("%%writefile "):
                first_line, _, script = source.partition("\n")
                (tmp_path / first_line.split()[1]).write_text(script)
                continue
            statements = source.removesuffix("!{command}")
            exec(compile(statements, "cell", "exec"), variables)
            if statements != source:
                words = shlex.split(variables["command"])
                assert words[:4] == [sys.executable, "-m", "hybrid_imagenet", "run"]
                options, script, _ = split_command(words[4:])
                assert options == ["-np", "2"]
                outputs_on_ranks = pools[2].call(run, script, [], str(tmp_path))
    assert accuracy(capsys.readouterr().out, "validation accuracy on one rank") > 0.9
    assert accuracy(outputs_on_ranks[0], "validation accuracy on 2 ranks") > 0.9
    plotted = [call.args[1] for call in pyplot.plot.call_args_list]
    assert plotted == [variables[name]["val_accuracy"] for name in ("one_rank", "two_ranks")]


def test_example_with_checkpoints_continues_where_it_stopped(pools, tmp_path):
    def epochs(number):
        arguments = [f"--epochs={number}", "--folder=kept"]
        output, _ = pools[2].call(
            run, str(ROOT / "examples" / "resume.py"), arguments, str(tmp_path)
        )
        return re.search(r"epochs trained in this start: (\d+) of (\d+)", output).groups()

    assert epochs(1) == ("1", "1")
    assert epochs(3) == ("2", "3")
