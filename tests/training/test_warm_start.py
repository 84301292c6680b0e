"""Warm start: `--init_from`, `--freeze` and `--model=MODULE:FUNCTION`."""

import dataclasses

import keras
import numpy as np
import pytest

from hybrid_imagenet import config
from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
from hybrid_imagenet.data import device
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory
from hybrid_imagenet.training import warm_start
from tests.commands.export.support import save
from tests.support import in_process, program

SMALL = {"image_size": 16, "width": 4, "zero_last_gamma": False}
FLAGS = ("--image_size=16", "--epochs=1", "--warmup_epochs=0", "--optimizer=sgd", "--lr=0.1")


def network(classes, seed, **changes):
    return factory.create("resnet8", classes, seed=seed, **(SMALL | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a network for five classes, and its file."""
    source = network(5, 1)
    weights = {v.path: v.numpy() for v in source.weights}
    names = tuple("abcde")
    network_ = TrainedNetwork("here", "resnet8", names, 16, 0.875, 1e-5, width=4, weights=weights)
    path = tmp_path_factory.mktemp("trained") / "source.npz"
    save(network_, path)
    return network_, path


def test_load_gives_the_scores_of_the_file(trained):
    source, path = trained
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    target = network(5, 2)
    (line,) = warm_start.load(str(path), target, "abcde")
    assert line == f"weights of {path} (resnet8, 5 classes)"
    expected = source.build()(source.preprocess(images))
    np.testing.assert_allclose(
        target(device.normalize(images, "float32")), expected, rtol=2e-3, atol=2e-3
    )


def test_load_for_other_classes_keeps_a_new_head(trained):
    _, path = trained
    target = network(4, 2)
    before = {v.path: v.numpy() for v in target.weights}
    _, line = warm_start.load(str(path), target, "abcd")
    assert "logits/kernel, logits/bias" in line
    same = {v.path for v in target.weights if np.array_equal(v.numpy(), before[v.path])}
    assert {"logits/kernel", "logits/bias"} <= same
    assert not [path for path in same if path.endswith("_conv/kernel")]
    with pytest.raises(
        UserError,
        match=r"--init_from=.*has shape .* there, .* needs .*that file is of resnet8, width 4",
    ):
        warm_start.load(str(path), network(4, 2, width=8), "abcd")
    with pytest.raises(UserError, match="does not exist"):
        warm_start.load(str(path.parent / "none.npz"), target, "abcd")


def test_load_for_as_many_classes_with_other_names_says_so(trained):
    _, path = trained
    _, line = warm_start.load(str(path), network(5, 2), "abcdx")
    assert "its classes have other names (" in line
    assert "the last layer is loaded all the same" in line
    # Data without names of classes has numbers.
    assert len(warm_start.load(str(path), network(5, 2), "01234")) == 1


def test_load_finds_the_head_before_layers_without_weights(tmp_path):
    def create(classes):
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(4, 8, name="first"),
                layers.Conv2D(classes, 1, name="scores"),
                layers.Reshape((classes,)),
                layers.Activation("linear"),
            ],
            name="net",
        )

    source = create(5)
    target = create(4)
    weights = {v.path: v.numpy() for v in source.weights}
    path = tmp_path / "source.npz"
    save(TrainedNetwork("here", "a:b", tuple("abcde"), 8, 1.0, 1e-5, weights=weights), path)
    _, line = warm_start.load(str(path), target, "abcd")
    assert "net/scores/kernel, net/scores/bias" in line
    np.testing.assert_array_equal(target.weights[0].numpy(), weights["net/first/kernel"])


@pytest.mark.slow
def test_freeze_keeps_the_weights_of_the_file_during_training(trained, tiny_data, tmp_path):
    source, path = trained
    # Training ends before the first update of the average, so it stays at its initial values.
    average = ("--ema_decay=0.9", "--ema_every=50")
    flags = ("--model_width=4", "--stem=imagenet", f"--init_from={path}", "--freeze=stem", *average)
    done = program.train_here(tiny_data, tmp_path / "run", *FLAGS, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logits/kernel" in done.stdout
    (file,) = (tmp_path / "run" / "checkpoints").glob("step-*.npz")
    arrays = archive.read(file).arrays
    saved = {
        name.split("/", 2)[2]: value for name, value in arrays.items() if name.startswith("model/")
    }
    frozen = [name for name in saved if name.startswith("stem")]
    assert len(frozen) > 3
    for name in frozen[1:]:
        np.testing.assert_array_equal(saved[name], source.weights[name], err_msg=name)
    averaged = {
        name.split("/", 2)[2]: value
        for name, value in arrays.items()
        if name.startswith("average/")
    }
    for name in [name for name in averaged if name.endswith("_conv/kernel")]:
        np.testing.assert_array_equal(averaged[name], source.weights[name], err_msg=name)
    others = [name for name in saved if name not in frozen and not name.startswith("logits")]
    assert not any(np.array_equal(saved[name], source.weights[name]) for name in others)


def test_freeze_of_an_unknown_layer_or_of_all_layers_is_rejected():
    with pytest.raises(UserError, match="--freeze=middle: "):
        warm_start.freeze(network(4, 2), ("middle",))
    target = network(4, 2)
    with pytest.raises(UserError, match="nothing is left to train"):
        warm_start.freeze(target, tuple(layer.name for layer in target.layers if layer.weights))


def test_user_network_trains_and_can_be_built_from_its_checkpoint(tiny_data, tmp_path):
    run = tmp_path / "run"
    common = [
        flag
        for flag in program.FLAGS
        if not flag.startswith(("--model", "--model_width", "--stem"))
    ]
    flags = [
        "--model=tests.training.own_networks:small",
        "--freeze=first",
        f"--data_dir={tiny_data}",
        f"--run_dir={run}",
    ]
    code, output, errors = in_process.call("hybrid_imagenet.main", [*common, *FLAGS, *flags])
    assert code == 0, output + errors
    (file,) = (run / "checkpoints").glob("step-*.npz")
    names = {
        "/".join(name.split("/")[-2:])
        for name in archive.read(file).arrays
        if name.startswith("model/")
    }
    assert names == {"first/kernel", "first/bias", "norm/gamma", "norm/beta", "norm/moving_mean",
                     "norm/moving_variance", "scores/kernel", "scores/bias"}  # fmt: skip
    assert dataclasses.replace(
        TrainedNetwork.from_description(
            {
                "origin": "",
                "model": "tests.training.own_networks:small",
                "class_names": ["a", "b"],
                "image_size": 16,
                "crop_fraction": 1.0,
                "batch_norm_epsilon": 1e-5,
            }
        )
    ).build().output_shape == (None, 2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:f", r"No module named 'no'\. Pass MODULE:FUNCTION"),
        ("tests.training.own_networks:smal", r"has no attribute 'smal'\. Pass MODULE:FUNCTION"),
        (
            "tests.training.own_networks:without_arguments",
            "It is called with num_classes and image_size",
        ),
        ("tests.training.own_networks:wrong", r"its output has shape \(None, 4\), not \(None, 3\)"),
        ("tests.training.own_networks:regularized", "regularizers and constraints are not applied"),
        (
            "tests.training.own_networks:with_softmax",
            "the layer last returns probabilities, not logits",
        ),
        (
            "tests.training.own_networks:of_another_size",
            (
                r"its input has shape \(None, 32, 32, 3\), not \(None, 16, 16, 3\)\. .*set"
                r" --image_size=32\."
            ),
        ),
        (
            "tests.training.own_networks:gray",
            r"its input has shape \(None, 16, 16, 1\)\. It is called with images of",
        ),
        ("tests.training.own_networks:with_two_inputs", "it has 2 inputs, not one"),
        (
            "tests.training.own_networks:exits",
            r"it called sys\.exit\(0\) in .*own_networks\.py, line \d+\. Return",
        ),
        (
            "tests.training.own_networks:fails",
            r"RuntimeError in .*own_networks\.py, line \d+: no weights\. Correct",
        ),
        (
            "tests.training.own_networks:synchronized",
            r"each rank normalizes its own batch\. Omit synchronized=True",
        ),
    ],
)
def test_create_of_a_function_without_a_valid_network_is_rejected(name, reason):
    with pytest.raises(UserError, match=f"--model={name}: .*{reason}"):
        factory.create(name, 3, 16)


def test_create_of_a_user_network_for_images_of_any_size_is_accepted():
    assert factory.create("tests.training.own_networks:of_any_size", 3, 16).output_shape == (
        None,
        3,
    )


def test_create_of_a_user_network_with_a_custom_call_is_accepted():
    assert factory.create("tests.training.own_networks:with_logits", 3, 16).output_shape == (
        None,
        3,
    )


def test_create_of_a_user_network_initializes_it_with_the_seed():
    weights = [
        factory.create("tests.training.own_networks:small", 3, 16, seed=seed).get_weights()
        for seed in (5, 5, 6)
    ]
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    assert np.any(weights[0][0] != weights[2][0])


def test_flags_of_built_in_networks_with_a_user_network_are_rejected():
    flags = ["--dataset=synthetic", "--model=a:b"]
    assert config.resolve(flags).network.model == "a:b"
    for flag in (
        "--model_width=8",
        "--ema_decay=0.9",
        "--sync_batch_norm",
        "--initializer=xavier",
    ):
        with pytest.raises(
            UserError, match=rf"{flag.partition('=')[0]}=.* is for the built-in networks. Omit it"
        ):
            config.resolve([*flags, flag])
    with pytest.raises(
        UserError, match=r"Choose one of resnet8, .*or your own function as MODULE:FUNCTION"
    ):
        config.resolve(["--model=mine"])
