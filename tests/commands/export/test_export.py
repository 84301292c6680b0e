"""Tests `export`: files of every format against an oracle, and errors of the command line."""

import dataclasses
import importlib.util
import json
import pathlib
import runpy
import sys
import zipfile

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet.checkpoints import archive, pretrained
from hybrid_imagenet.commands import command_line, export_formats, predict
from hybrid_imagenet.commands import export as program
from hybrid_imagenet.data import images
from hybrid_imagenet.errors import EXIT_USAGE, UserError
from hybrid_imagenet.models import factory
from tests.commands.export.support import (
    CLASSES,
    assert_close,
    network,
    pixels,
    reference,
    save,
    small_network,
)
from tests.data import test_images

ONNX_EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "onnx_predict.py"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Writes a checkpoint with random weights; tests must not change it.

    The network sees the central half of an image.
    """
    folder = tmp_path_factory.mktemp("stored")
    save(network(folder, crop_fraction=0.5), folder / "weights.npz")
    return folder / "weights.npz"


@pytest.fixture(scope="module")
def stored_small(tmp_path_factory):
    """Writes a checkpoint of a small network; tests must not change it."""
    path = tmp_path_factory.mktemp("stored_small") / "weights.npz"
    save(small_network(), path)
    return path


@pytest.fixture(scope="module")
def as_onnx(stored, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "network.onnx"
    export(stored, path)
    return path


def export(source, path, *flags):
    assert program.main([str(source), f"--to={path}", *flags]) == 0
    assert [p for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_export_to_keras_can_be_loaded_without_the_package(stored, tmp_path, capsys):
    path = tmp_path / "network.keras"
    export(stored, path)
    assert f"wrote {path} (Keras); outputs differ by at most" in capsys.readouterr().out
    with zipfile.ZipFile(path) as archive:
        assert b"hybrid_imagenet" not in archive.read("config.json")
    images = pixels(2, seed=5)
    assert_close(keras.saving.load_model(path)(images).numpy(), reference(images))


def test_export_to_saved_model_computes_the_reference_logits(stored, tmp_path):
    export(stored, tmp_path / "saved_model")
    loaded = tf.saved_model.load(str(tmp_path / "saved_model"))
    images = pixels(5, seed=5)
    assert_close(loaded.serve(images).numpy(), reference(images))


def test_export_to_onnx_computes_the_reference_logits_and_names_classes(as_onnx):
    session = onnxruntime.InferenceSession(as_onnx, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 32, 32, 3]
    images = pixels(5, seed=5)
    assert_close(session.run(["logits"], {"image": images})[0], reference(images))
    metadata = {prop.key: prop.value for prop in onnx.load(as_onnx).metadata_props}
    assert json.loads(metadata["class_names"]) == list(CLASSES)
    assert (int(metadata["image_size"]), float(metadata["crop_fraction"])) == (32, 0.5)


def photograph(height, width):
    """Returns smooth shapes with noise, whose pixels depend on interpolation and rounding."""
    generator = np.random.default_rng(height)
    shapes = Image.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8)).resize(
        (width, height)
    )
    noise = generator.normal(0, 12, (height, width, 3))
    return Image.fromarray((np.asarray(shapes) + noise).clip(0, 255).astype(np.uint8))


def photograph_file(form, size, **options):
    return images.encode(photograph(*size), form, **options)


@pytest.mark.parametrize(
    ("content", "mean", "largest"),
    [
        pytest.param(photograph_file("PNG", (420, 560)), 0, 0, id="large PNG"),
        pytest.param(photograph_file("PNG", (45, 70)), 0, 0, id="small PNG"),
        pytest.param(photograph_file("BMP", (101, 97)), 0, 0, id="BMP"),
        pytest.param(
            photograph_file("JPEG", (100, 130), quality=90, subsampling=0), 0, 0, id="JPEG 4:4:4"
        ),
        pytest.param(photograph_file("JPEG", (420, 560), quality=90), 0, 0, id="large JPEG"),
        pytest.param(
            photograph_file("JPEG", (100, 130), quality=95, progressive=True),
            0.1,
            15,
            id="progressive JPEG",
        ),
        pytest.param(test_images.deep_png((90, 70, 1)), 0, 0, id="gray of 16 bits"),
        pytest.param(test_images.deep_png((90, 70, 2)), 0, 0, id="gray of 16 bits with alpha"),
        pytest.param(test_images.deep_png((90, 70, 3)), 0, 0, id="RGB of 16 bits"),
        pytest.param(test_images.deep_png((90, 70, 4)), 0, 0, id="RGBA of 16 bits"),
        pytest.param(test_images.transparent_gif(), 0, 0, id="transparent GIF"),
        pytest.param(test_images.cmyk_jpeg(adobe_marker=True), 1, 1, id="CMYK"),
        pytest.param(test_images.cmyk_jpeg(adobe_marker=False), 1, 1, id="CMYK without marker"),
    ],
)
def test_onnx_example_takes_the_pixels_of_predict(content, mean, largest, stored, tmp_path):
    path = tmp_path / "cat.jpg"
    path.write_bytes(content)
    network = pretrained.load(stored, print)
    load_pixels = runpy.run_path(str(ONNX_EXAMPLE))["load_pixels"]
    pixels = load_pixels(str(path), network.image_size, network.crop_fraction)
    differences = np.abs(pixels - predict._decode_image(network, path))
    assert differences.mean() <= mean
    assert differences.max() <= largest


def test_onnx_example_prints_the_classes_of_predict(stored, as_onnx, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = [pathlib.Path("large.png"), pathlib.Path("small.png")]
    for path, size in zip(paths, ((420, 560), (45, 70)), strict=True):
        path.write_bytes(photograph_file("PNG", size))
    monkeypatch.setattr(sys, "argv", [str(ONNX_EXAMPLE), str(as_onnx), *map(str, paths)])
    runpy.run_path(str(ONNX_EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    network = pretrained.load(stored, print)
    for path, chances in predict.probabilities(network, paths, pytest.fail):
        assert lines.pop(0) == str(path)
        for index in np.argsort(chances)[::-1][:5]:
            percentage, name = lines.pop(0).split()
            assert name == CLASSES[index]
            assert float(percentage.rstrip("%")) == pytest.approx(100 * chances[index], abs=0.1)
    assert not lines


BLURRED = {"width": 4, "stem": "3x3_stride2", "blurpool": True}


@pytest.mark.parametrize(
    ("name", "size", "form", "tolerance"),
    [("alexnet_bn", 64, {}, 1e-4), ("resnet8", 16, BLURRED, 1e-5)],
)
def test_export_replaces_layers_of_the_package_by_keras_layers(
    tmp_path, name, size, form, tolerance
):
    model = factory.create(name, 3, size, **form)
    weights = {variable.path: variable.numpy() for variable in model.weights}
    trained = pretrained.TrainedNetwork(
        "trained", name, ("a", "b", "c"), size, 1.0, 1e-5, **form, weights=weights
    )
    images = pixels(2, size)
    expected = model(trained.preprocess(images), training=False).numpy()
    path = tmp_path / "network.keras"
    program.export(trained, export_formats.FORMATS[path.suffix], path)
    loaded = keras.saving.load_model(path)
    assert {type(layer).__module__.split(".")[0] for layer in loaded._flatten_layers()} == {"keras"}
    np.testing.assert_allclose(loaded(images), expected, atol=tolerance)


def test_export_removes_a_file_with_other_outputs(tmp_path):
    def write_wrong_bias(trained, path):
        wrong_weights = dict(trained.weights)
        wrong_weights["logits/bias"] = wrong_weights["logits/bias"] + 0.01
        export_formats.FORMATS[path.suffix].write(
            dataclasses.replace(trained, weights=wrong_weights), path
        )

    path = tmp_path / "wrong.keras"
    target = dataclasses.replace(export_formats.FORMATS[path.suffix], write=write_wrong_bias)
    with pytest.raises(UserError, match=r"The outputs of .* differ"):
        program.export(small_network(), target, path)
    assert list(tmp_path.iterdir()) == []


def test_load_best_returns_the_checkpoint_with_the_best_top1(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    weights = network(tmp_path)
    for step, top1 in ((1, 0.5), (2, 0.7), (3, None), (4, 0.9)):
        description = {
            **weights.description(),
            "num_classes": len(CLASSES),
            "val_top1": top1,
            "image_size": 10 * step,
        }
        archive.write(folder / f"step-{step:09d}.npz", {}, description)
    (folder / "step-000000004.npz").write_bytes(b"cut short")
    warnings = []
    assert pretrained.load(tmp_path, warnings.append, best=True).image_size == 20
    assert pretrained.load(tmp_path, warnings.append).image_size == 30
    assert len(warnings) == 2
    assert all("step-000000004.npz" in line for line in warnings)
    for step in (1, 2):
        (folder / f"step-{step:09d}.npz").unlink()
    with pytest.raises(UserError, match=r"--best: .* no usable checkpoint"):
        pretrained.load(tmp_path, warnings.append, best=True)
    with pytest.raises(UserError, match=r"--best: .* is a file"):
        pretrained.load(folder / "step-000000003.npz", warnings.append, best=True)


def test_load_best_of_a_run_that_kept_another_epoch_prints_a_line(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    description = network(tmp_path).description() | {"num_classes": len(CLASSES)}
    lines = []
    for best_top1, count in ((0.5, 0), (0.75, 1)):
        state = {"best_top1": best_top1, "best_epoch": 3.0}
        archive.write(
            folder / "step-000000007.npz", {}, {**description, "val_top1": 0.5, "state": state}
        )
        pretrained.load(tmp_path, lines.append, best=True)
        assert len(lines) == count
    assert lines == [
        "--best: epoch 3 was better (75.00 % top-1), but its checkpoint was not kept; using"
        " step-000000007.npz (50.00 %)"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npz", "--to=x.onnx"], "none.npz does not exist"),
        (["damaged.npz", "--to=x.onnx"], "damaged.npz is not a checkpoint, or is truncated"),
        (["weights.npz", "--to=x.onnx", "--best"], "--best: weights.npz is a file"),
        (["meta.npz", "--to=x.onnx"], "does not describe a network"),
        (
            ["weights.npz", "--to=x.tflite"],
            "--to=x.tflite does not end in the suffix of a format. Use one of: .keras (Keras)",
        ),
        (
            ["weights.npz", "--to=weights.npz"],
            "--to=weights.npz already exists. Choose a new name.",
        ),
        (
            ["weights.npz", "--to=none/x.onnx"],
            "--to=none/x.onnx is in the directory none, which does not exist.",
        ),
        (["weights.npz", "--to=/proc/x"], "--to=/proc/x cannot be written ("),
        (["weights.npz", "--to=/proc/x.keras"], "--to=/proc/x.keras cannot be written ("),
    ],
)
def test_export_with_invalid_arguments_prints_one_line(
    stored_small, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.npz").symlink_to(stored_small)
    (tmp_path / "damaged.npz").write_bytes(stored_small.read_bytes()[:-1000])
    archive.write(tmp_path / "meta.npz", {}, {"model": "resnet18"})
    assert program.main(arguments) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not captured.out
    assert not list(tmp_path.glob("x.*"))


def test_build_of_weights_of_another_network_raises(tmp_path):
    wrong = dataclasses.replace(network(tmp_path), model="resnet34")
    with pytest.raises(
        UserError, match=r"stage1_block3_1_conv/kernel is missing, but resnet34 at 32 pixels"
    ):
        wrong.build()
    fewer = dataclasses.replace(network(tmp_path), class_names=("a", "b"))
    with pytest.raises(UserError, match=r"logits/kernel has shape \(512, 7\)"):
        fewer.build()


def test_start_single_process_under_a_launcher_raises(monkeypatch, capsys):
    for name, value in {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with pytest.raises(UserError, match="export runs in a single process"):
        command_line.start_single_process("export")


@pytest.mark.parametrize(
    ("target", "missing", "message"),
    [
        (
            "x.safetensors",
            "",
            "--to=x.safetensors does not end in the suffix of a format. Use one of: .keras (Keras)",
        ),
        (
            "x.onnx",
            "onnxruntime",
            "--to: .onnx files need the package onnxruntime. Run pip install onnxruntime, or",
        ),
    ],
)
def test_export_to_an_unavailable_format_is_rejected_before_tensorflow_starts(
    target, missing, message, tmp_path, monkeypatch, capsys
):
    save(network(tmp_path), tmp_path / "weights.npz")
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    monkeypatch.setattr(
        command_line, "start_single_process", lambda name: pytest.fail("TensorFlow was started")
    )
    assert program.main(["weights.npz", f"--to={target}"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_export_writes_a_network_with_normalization_ops_and_an_inner_model(tmp_path):
    # Networks of keras.applications have all three, and take their input in a list.
    target = f"{__name__}:network_like_keras_applications"
    weights = {v.path: v.numpy() for v in factory.create(target, 2, 8).weights}
    trained = pretrained.TrainedNetwork("", target, ("a", "b"), 8, 1.0, 1e-5, weights=weights)
    save(trained, tmp_path / "weights.npz")
    export(tmp_path / "weights.npz", tmp_path / "network.onnx", f"--model={target}")
    images = pixels(2, 8)
    onnx_logits = export_formats.FORMATS[".onnx"].open(trained, tmp_path / "network.onnx")
    assert_close(onnx_logits(images), export_formats.logits_function(trained)(images))


def test_export_writes_a_sequential_network(tmp_path):
    target = f"{__name__}:sequential_network"
    weights = {v.path: v.numpy() for v in factory.create(target, 2, 8).weights}
    trained = pretrained.TrainedNetwork("", target, ("a", "b"), 8, 1.0, 1e-5, weights=weights)
    path = tmp_path / "network.keras"
    save(trained, tmp_path / "weights.npz")
    export(tmp_path / "weights.npz", path, f"--model={target}")
    images = pixels(2, 8)
    keras_logits = keras.saving.load_model(path)(images).numpy()
    assert_close(keras_logits, export_formats.logits_function(trained)(images))


def sequential_network(num_classes, image_size):
    image = keras.Input((image_size, image_size, 3))
    layers = [keras.layers.Flatten(), keras.layers.Dense(num_classes, name="scores")]
    return keras.Sequential([image, *layers])


def network_like_keras_applications(num_classes, image_size):
    """Returns a model that starts with Keras's own normalization and a function of keras.ops."""
    image = keras.Input((image_size, image_size, 3))
    x = keras.layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 5.0, 6.0])(image)
    x = keras.layers.Flatten()(keras.ops.flip(x, axis=-1))
    inner = keras.Sequential([keras.layers.Dense(num_classes, name="scores")], name="inner")
    return keras.Model([image], inner(x))
