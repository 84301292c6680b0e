"""Tests that evaluate, predict and export import a function only if the command line names it."""

import dataclasses
import sys

import keras
import pytest
from PIL import Image

from hybrid_imagenet import __main__ as program
from hybrid_imagenet.checkpoints import pretrained
from tests.commands.export.support import CLASSES, pixels, save

MODEL = "function_of_checkpoint:network"
# The module leaves a file when it is imported.
MODULE = """
import pathlib

import keras

pathlib.Path("imported").touch()


def network(num_classes, image_size):
    return keras.Sequential(
        [
            keras.Input((image_size, image_size, 3)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(num_classes, name="scores"),
        ]
    )
"""
COMMANDS = (
    ("evaluate", "weights.npz", "--dataset=tfrecord"),
    ("predict", "weights.npz", "image.png"),
    ("export", "weights.npz", "--to=network.keras"),
)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Makes a directory current that has a checkpoint, the module that it names and an image."""
    monkeypatch.chdir(tmp_path)
    # As for `python -m hybrid_imagenet`.
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "function_of_checkpoint", raising=False)
    (tmp_path / "function_of_checkpoint.py").write_text(MODULE)
    scores = keras.layers.Dense(len(CLASSES), name="scores")
    scores.build((None, 3))
    weights = {f"sequential/{variable.path}": variable.numpy() for variable in scores.weights}
    trained = pretrained.TrainedNetwork("own", MODEL, CLASSES, 8, 1.0, 1e-5, weights=weights)
    save(trained, tmp_path / "weights.npz")
    built_in = dataclasses.replace(trained, model="resnet8")
    save(built_in, tmp_path / "resnet8.npz")
    Image.fromarray(pixels(1, size=8)[0].astype("uint8")).save(tmp_path / "image.png")
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_commands_with_a_function_that_is_not_named_do_not_import_it(directory, capsys, words):
    assert program.main(words) == 2
    assert capsys.readouterr().err == (
        f"error: weights.npz needs the function {MODEL}, which would run code. If you trust it, add"
        f" --model={MODEL}.\n"
    )
    assert not (directory / "imported").exists()


def test_commands_with_the_function_of_the_checkpoint_build_its_network(directory, capsys):
    for words in COMMANDS[1:]:
        assert program.main([*words, f"--model={MODEL}"]) == 0, capsys.readouterr().err
    assert (directory / "imported").exists()


@pytest.mark.parametrize(
    ("checkpoint", "named", "trained"),
    [("weights.npz", "other:network", MODEL), ("resnet8.npz", MODEL, "resnet8")],
)
def test_commands_with_another_function_reject_it(directory, capsys, checkpoint, named, trained):
    assert program.main(["predict", checkpoint, "image.png", f"--model={named}"]) == 2
    message = (
        f"error: --model={named} is not the network of {checkpoint}, which was trained with"
        f" --model={trained}."
    )
    assert capsys.readouterr().err.startswith(message)
    assert not (directory / "imported").exists()


def test_load_network_checks_the_function_of_the_loaded_checkpoint(directory, capsys, monkeypatch):
    # Another checkpoint may be the latest one when the network is loaded.
    monkeypatch.setattr("hybrid_imagenet.commands.command_line.find_checkpoint", lambda _: None)
    assert program.main(["predict", "weights.npz", "image.png"]) == 2
    assert f"add --model={MODEL}." in capsys.readouterr().err
    assert not (directory / "imported").exists()


@pytest.mark.parametrize(
    ("words", "is_used"),
    [
        (["train"], True),
        (["run", "-np", "2"], True),
        (["resume", "runs/a"], True),
        (["evaluate", "runs/a"], False),
        (["export", "runs/a", "--to=x.onnx"], False),
        (["evaluate", "runs/a", "--model=a:b"], True),
        (["evaluate", "runs/a", "--model", "a:b"], True),
        ([], False),
    ],
)
def test_run_process_imports_from_the_current_directory_only_if_asked(words, is_used, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(program, "_TRAINING_COMMANDS", ())
    monkeypatch.setattr(program.lossy_stream, "install", lambda: None)
    monkeypatch.setattr(program.interrupts, "run_interruptible", lambda function: function())
    paths = []
    monkeypatch.setattr(program, "main", lambda words: paths.extend(sys.path) or 0)
    before = [*sys.path]
    assert program.run_process(words) == 0
    assert paths == [*before, ""] if is_used else paths == before
