"""Weights of keras.applications, against keras.applications."""

import dataclasses

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.export import command as program
from hybrid_imagenet.tools.export import targets
from tests.tools.export.support import assert_close, network, pixels

CLASSES, SIZE = 7, 64


def original():
    shape = (SIZE, SIZE, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=CLASSES, classifier_activation=None)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A network with random weights, none of them at its usual start, and its file."""
    model = original()
    rng = np.random.default_rng(1)
    for variable in model.weights:
        name, shape = variable.path.rpartition("/")[2], variable.shape
        values = {
            "gamma": lambda shape=shape: rng.uniform(0.5, 1.0, shape),
            "moving_variance": lambda shape=shape: rng.uniform(0.7, 1.5, shape),
            "kernel": lambda shape=shape: rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape),
        }.get(name, lambda shape=shape: rng.normal(0, 0.2, shape))
        variable.assign(values())
    path = tmp_path_factory.mktemp("applications") / "resnet50.weights.h5"
    model.save_weights(path)
    return model, path


@pytest.fixture(scope="module")
def loaded(stored):
    """The file, as this package reads it."""
    return dataclasses.replace(pretrained.load(stored[1], print), image_size=SIZE)


@pytest.fixture(scope="module")
def another():
    """A network of keras.applications to load files into."""
    return original()


@pytest.fixture(scope="module")
def images():
    return pixels(2, SIZE)


@pytest.fixture(scope="module")
def expected(stored, images):
    """What keras.applications makes of the images."""
    return outputs(stored[0], images)


def outputs(model, images):
    return model(keras.applications.resnet.preprocess_input(images.copy()), training=False).numpy()


def test_imported_weights_give_the_same_outputs(loaded, images, expected):
    assert_close(targets.outputs(loaded)(images), expected)


def test_the_form_of_the_published_files_is_read_too(stored, loaded, tmp_path):
    older = tmp_path / "older.h5"
    with h5py.File(older, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, stored[0])
    weights = pretrained.load(older, print).weights
    assert set(weights) == set(loaded.weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(value, loaded.weights[name])


def test_exported_weights_load_into_keras_applications(loaded, another, images, expected, tmp_path):
    again = tmp_path / "again.weights.h5"
    program.export(loaded, targets.find(again), again)
    another.load_weights(again)
    assert_close(outputs(another, images), expected)


def test_the_form_travels_with_a_checkpoint(loaded, images, expected, tmp_path):
    saved = tmp_path / "imported.npz"
    program.export(loaded, targets.find(saved), saved)
    assert_close(targets.outputs(pretrained.load(saved, print))(images), expected)


def test_weights_for_images_normalized_as_in_pytorch(stored, another, images, tmp_path):
    """`--pixels=torch`: the stem takes RGB images that `preprocess_input(..., mode="torch")` normalized."""
    model, path = stored
    own = dataclasses.replace(pretrained.load(path, print, bgr=False), image_size=SIZE)
    normal = keras.applications.imagenet_utils.preprocess_input(images.copy(), mode="torch")
    expected = model(normal, training=False).numpy()
    assert_close(targets.outputs(own)(images), expected)
    again = tmp_path / "again.weights.h5"
    program.export(own, targets.find(again), again)
    another.load_weights(again)
    assert_close(another(normal, training=False).numpy(), expected)


def test_what_cannot_be_mapped_is_refused(loaded, tmp_path):
    here, there = tmp_path / "x.weights.h5", tmp_path / "x.safetensors"
    with pytest.raises(UserError, match="strides in the 3x3 convolutions"):
        program.export(network(tmp_path), targets.find(here), here)
    with pytest.raises(UserError, match="which torchvision does not have"):
        program.export(loaded, targets.find(there), there)
    headless = tmp_path / "headless.weights.h5"
    keras.applications.ResNet50(weights=None, include_top=False).save_weights(headless)
    with pytest.raises(UserError, match="53 convolutions, 0 classifiers"):
        pretrained.load(headless, print)
    headless.write_bytes(b"none")
    with pytest.raises(UserError, match="cannot be read as an HDF5 file"):
        pretrained.load(headless, print)
    assert not here.exists()
    assert not there.exists()
