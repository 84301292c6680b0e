"""Tests `predict`: classes and probabilities of image files."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet.commands import predict
from hybrid_imagenet.data import images
from hybrid_imagenet.errors import EXIT_USAGE
from tests.commands.export.support import CLASSES, network, pixels, reference, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes a checkpoint with random weights, which tests must not change; returns its path."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save(network(folder), folder / "weights.npz")
    return folder / "weights.npz"


@pytest.fixture
def folder(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.npz").symlink_to(checkpoint)
    for number, image in enumerate(pixels(2, seed=3).astype(np.uint8)):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes()[:500])
    os.mkfifo(tmp_path / "pipe.png")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(2 << 30)
    damaged = bytearray((tmp_path / "0.png").read_bytes())
    damaged[200:260] = bytes(60)
    (tmp_path / "damaged.png").write_bytes(damaged)
    return tmp_path


def expected_probabilities():
    logits = reference(pixels(2, seed=3))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def test_predict_probabilities_equal_the_reference(folder, capsys):
    assert predict.main(["weights.npz", "0.png", "1.png", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["image"] for result in results] == ["0.png", "1.png"]
    for result, values in zip(results, expected_probabilities(), strict=True):
        order = np.argsort(-values)[:5]
        assert [entry["class"] for entry in result["predictions"]] == [CLASSES[i] for i in order]
        assert [entry["index"] for entry in result["predictions"]] == order.tolist()
        printed = [entry["probability"] for entry in result["predictions"]]
        np.testing.assert_allclose(printed, values[order], rtol=0, atol=1e-5)


def test_predict_prints_the_most_probable_classes(folder, capsys):
    assert predict.main(["weights.npz", "1.png", "--top=2"]) == 0
    values = expected_probabilities()[1]
    lines = [f"  {100 * values[i]:7.3f} %  {CLASSES[i]}" for i in np.argsort(-values)[:2]]
    assert capsys.readouterr().out.splitlines() == ["1.png", *lines]


def test_format_result_escapes_control_characters(folder, capsys):
    result = {
        "image": "a\x1b]0;title\x07.png",
        "predictions": [{"class": "cat\x1b[2J\u202e", "probability": 0.5}],
    }
    text = predict._format_result(result)
    assert text.splitlines() == [r"a\x1b]0;title\x07.png", r"   50.000 %  cat\x1b[2J\u202e"]


def test_predict_uses_the_central_square(folder, capsys):
    image = pixels(1, seed=3)[0].astype(np.uint8)
    Image.fromarray(np.pad(image, ((0, 0), (20, 20), (0, 0)))).save(folder / "wide.png")
    answers = []
    # Each call has one image, because a kernel may sum in another order elsewhere in a batch.
    for name in ("0.png", "wide.png"):
        assert predict.main(["weights.npz", name, "--json"]) == 0
        answers += json.loads(capsys.readouterr().out)
    first, second = (answer["predictions"] for answer in answers)
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["weights.npz", "none.png"],
            "none.png cannot be used: No such file or directory",
        ),
        (
            ["weights.npz", "text.png"],
            "text.png is not a JPEG, PNG, BMP, GIF, WebP or JPEG XL image",
        ),
        (["weights.npz", "cut.png"], "cut.png cannot be used: the PNG is truncated"),
        (
            ["weights.npz", "damaged.png"],
            "damaged.png cannot be used: the image does not decode (Invalid PNG",
        ),
        (
            ["weights.npz", "/dev/zero"],
            "/dev/zero is not a regular file. Pass an image file that can be read.",
        ),
        (["weights.npz", "pipe.png"], "pipe.png is not a regular file"),
        (
            ["weights.npz", "large.png"],
            "large.png has 2,147,483,648 bytes, and at most 1,073,741,824 are read",
        ),
        (["pipe.png", "0.png"], "pipe.png is not a regular file. Pass a checkpoint"),
        (
            ["weights.npz", "0.png", "--top=none"],
            "--top=none is not valid. Use a whole number of at least 1",
        ),
    ],
)
def test_predict_with_invalid_arguments_prints_one_line(folder, capsys, arguments, message):
    assert predict.main(arguments) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_predict_with_unusable_images_names_them_and_predicts_the_others(folder, capsys):
    unusable = ["text.png", "damaged.png", "none.png"]
    assert predict.main(["weights.npz", "0.png", *unusable, "1.png", "--json"]) == EXIT_USAGE
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert [result["image"] for result in results] == ["0.png", "1.png"]
    for result, values in zip(results, expected_probabilities(), strict=True):
        printed = [entry["probability"] for entry in result["predictions"]]
        np.testing.assert_allclose(printed, np.sort(values)[::-1][:5], rtol=0, atol=1e-5)
    # Damage inside a file is found last, when the image is decoded.
    named = [line.split()[1] for line in captured.err.splitlines()]
    assert named == ["text.png", "none.png", "damaged.png"]


def test_predict_that_runs_out_of_memory_does_not_blame_the_image(folder, capsys, monkeypatch):
    def decode(*arguments, **options):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(images, "decode", decode)
    assert predict.main(["weights.npz", "0.png"]) == EXIT_USAGE
    assert "The memory of the host is too small" in capsys.readouterr().err
