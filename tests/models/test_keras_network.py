"""Networks of keras.applications (`--model=keras:NAME`)."""

import json

import keras
import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.commands import evaluate
from hybrid_imagenet.data import device
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory, keras_families, keras_network
from tests.support import in_process, program

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)


def test_keras_families_name_every_network_of_the_installed_keras():
    public = {name for name in dir(keras.applications) if name[0].isupper()}
    assert set(keras_families.NAMES) == public


@pytest.mark.parametrize("family", keras_families.FAMILIES, ids=lambda family: family.module)
def test_prepare_images_of_normalized_pixels_equals_the_familys_preprocess_input(family):
    image = keras.Input((8, 8, 3))
    prepare = keras.Model(image, keras_network.prepare_images(image, family.input_range))
    prepared = prepare(device.normalize(PIXELS)).numpy()
    # EfficientNet normalizes in a layer of its network, which another test checks.
    if family.module == "efficientnet":
        expected = 255 * device.normalize(PIXELS).numpy()
    else:
        module = getattr(keras.applications, family.module)
        expected = module.preprocess_input(PIXELS.astype(np.float32))
    np.testing.assert_allclose(prepared, expected, rtol=1e-5, atol=1e-4)


def test_efficientnet_convolutions_see_normalized_images():
    network = factory.create("keras:EfficientNetB0", 2, 32)
    first_layers = keras.Model(network.inputs, network.get_layer("normalization").output)
    images = device.normalize(np.tile(PIXELS, (1, 4, 4, 1)))
    np.testing.assert_allclose(first_layers(images), images, rtol=1e-5, atol=1e-5)


def test_prepare_images_of_bfloat16_images_computes_in_float32():
    image = keras.Input((8, 8, 3), dtype="bfloat16")
    prepared = keras_network.prepare_images(image, "pixels")
    assert prepared.dtype == "float32"


def test_create_twice_gives_the_same_paths_and_the_seed_gives_the_weights():
    first, same, other = (
        factory.create("keras:MobileNet", 3, 32, precision="mixed_bfloat16", seed=seed)
        for seed in (5, 5, 6)
    )
    assert [v.path for v in first.weights] == [v.path for v in same.weights]
    assert first.inputs[0].dtype == "bfloat16"
    assert first.outputs[0].dtype == "float32"
    kernel = first.get_layer("conv1").kernel.numpy()
    np.testing.assert_array_equal(kernel, same.get_layer("conv1").kernel.numpy())
    assert np.any(kernel != other.get_layer("conv1").kernel.numpy())


@pytest.mark.parametrize(
    ("model", "image_size", "message"),
    [
        ("keras:resnet50", 32, r"no network 'resnet50' \(did you mean keras:ResNet50\?\)\."),
        (
            "keras:EfficientNetB9",
            32,
            r"\(did you mean keras:EfficientNetB\d or keras:EfficientNetB\d\?\)",
        ),
        ("keras:", 32, "no network ''. After keras:, choose one of ConvNeXtTiny, "),
        ("keras:Xception", 70, "--image_size=70: keras:Xception needs at least 71 pixels"),
        ("keras:VGG16", None, "needs one image size"),
    ],
)
def test_create_of_a_wrong_name_or_size_is_an_error(model, image_size, message):
    with pytest.raises(UserError, match=message):
        factory.create(model, 2, image_size)


# The smallest network of each family.
SMALLEST = {family.module: family.names[0] for family in keras_families.FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("family", keras_families.FAMILIES, ids=lambda family: family.module)
def test_create_builds_each_family_at_its_smallest_size(family):
    size = family.min_image_size
    name = SMALLEST[family.module]
    network = factory.create(f"keras:{name}", 3, size)
    assert network.output_shape == (None, 3)
    assert np.isfinite(network(np.zeros((1, size, size, 3), np.float32))).all()
    with pytest.raises(ValueError, match=f"at least {size}x{size}"):
        getattr(keras.applications, name)(weights=None, input_shape=(size - 1, size - 1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MobileNetV3Small", "VGG16", "ConvNeXtTiny"])
def test_keras_network_trains_resumes_and_evaluates_as_recorded(name, tiny_data, tmp_path, capsys):
    run = tmp_path / "run"
    flags = [
        *(f"--model=keras:{name}", "--image_size=32", "--epochs=2"),
        *("--warmup_epochs=0", "--optimizer=sgd", "--lr=0.01", "--per_gpu_batch=16"),
    ]
    train(tiny_data, run, *flags, "--max_steps=4")
    train(tiny_data, run, *flags, "--resume")
    epochs = [record for record in program.records(run) if record["kind"] == "epoch"]
    assert np.isfinite([record["train_loss"] for record in epochs]).all()
    file = max((run / "checkpoints").glob("step-*.npz"))
    assert archive.read(file).meta["model"] == f"keras:{name}"
    capsys.readouterr()
    data = ["--dataset=tfrecord", f"--data_dir={tiny_data}", "--precision=float32", "--json"]
    assert evaluate.main([str(file), *data]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss"] == pytest.approx(epochs[-1]["val_loss"], rel=1e-5)


def train(data, run, *flags):
    """Runs the program with --model and without the flags of built-in networks."""
    common = [
        flag for flag in program.FLAGS if not flag.startswith(("--model", "--stem", "--image_size"))
    ]
    code, output, errors = in_process.call(
        "hybrid_imagenet.main", [*common, f"--data_dir={data}", f"--run_dir={run}", *flags]
    )
    assert code == 0, output + errors
