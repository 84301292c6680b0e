"""Tests that weights or scores that are not finite are an error, and not predictions of nan %."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from hybrid_imagenet.commands import evaluate, export, predict
from hybrid_imagenet.errors import EXIT_USAGE
from tests.commands.export.support import CLASSES, network, pixels, save


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes an image of each class for both splits, and changes to their directory."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        for number, name in enumerate(CLASSES):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            image = Image.fromarray(pixels(1, seed=number)[0].astype(np.uint8))
            image.save(tmp_path / "photos" / split / name / "0.png")
    return tmp_path


def save_with(folder, name, value):
    """Saves a network in which one weight has another value."""
    trained = network(folder)
    weights = dict(trained.weights)
    weights[name] = weights[name].copy()
    weights[name].flat[0] = value
    save(dataclasses.replace(trained, weights=weights), folder / "weights.npz")


PROGRAMS = {
    "predict": lambda: predict.main(["weights.npz", "photos/val/ant/0.png"]),
    "export": lambda: export.main(["weights.npz", "--to=network.keras"]),
    "evaluate": lambda: evaluate.main(
        ["weights.npz", "--dataset=folder", "--data_dir=photos", "--precision=float32"]
    ),
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("program", PROGRAMS)
def test_commands_on_weights_that_are_not_finite_print_an_error(program, value, folder, capsys):
    save_with(folder, "logits/kernel", value)
    # Loading the first weights prints that they do not name their network.
    capsys.readouterr()
    assert PROGRAMS[program]() == EXIT_USAGE
    captured = capsys.readouterr()
    reason = (
        "variables hold NaN or infinity, such as logits/kernel, so it cannot predict anything. Pass"
        " an earlier"
    )
    assert captured.err.startswith("error: weights.npz: 1 of its ")
    assert reason in captured.err
    assert not captured.out
    assert not (folder / "network.keras").exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "predict",
            "The scores of weights.npz for photos/val/ant/0.png are not finite numbers",
        ),
        ("export", "The scores of weights.npz for random images are not finite numbers"),
        (
            "evaluate",
            "The loss of weights.npz is nan in float32, because its scores are not finite numbers",
        ),
    ],
)
def test_commands_with_scores_that_are_not_finite_print_an_error(program, message, folder, capsys):
    trained = network(folder)
    weights = dict(trained.weights)
    weights["logits/kernel"] = np.full_like(weights["logits/kernel"], 3e38)
    weights["logits/kernel"][::2] *= -1
    save(dataclasses.replace(trained, weights=weights), folder / "weights.npz")
    # Loading the first weights prints that they do not name their network.
    capsys.readouterr()
    assert PROGRAMS[program]() == EXIT_USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
