"""Provides a small network with random weights, its reference outputs, and a comparison."""

import dataclasses
import functools

import numpy as np
from safetensors.numpy import save_file

from hybrid_imagenet.checkpoints import archive, pretrained
from hybrid_imagenet.models import factory
from tests.references import torchvision_reference

CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
# Mean and standard deviation of ImageNet's RGB channels, as in torchvision.
MEAN = np.array([0.485, 0.456, 0.406])
DEVIATION = np.array([0.229, 0.224, 0.225])


@functools.cache
def tensors(name="resnet18"):
    """Returns random weights in torchvision's names and layouts; tests must not change them."""
    return torchvision_reference.state_dict(name, len(CLASSES))


def network(folder, name="resnet18", size=32, **changes):
    """Returns random weights in torchvision's format, loaded as a network of the package."""
    path = folder / f"{name}.safetensors"
    save_file(tensors(name), path)
    loaded = pretrained.load(path, print)
    settings = {"image_size": size, "class_names": CLASSES, "crop_fraction": 1.0} | changes
    return dataclasses.replace(loaded, **settings)


def small_network():
    """Returns random weights of a small network that torchvision does not have."""
    model = factory.create("resnet8", len(CLASSES), 16, width=4, stem="3x3")
    weights = {variable.path: variable.numpy() for variable in model.weights}
    return pretrained.TrainedNetwork(
        "small", "resnet8", CLASSES, 16, 1.0, 1e-5, width=4, stem="3x3", weights=weights
    )


def save(trained, path):
    """Saves a network as a checkpoint without the state of a run."""
    arrays = {
        f"model/{i:04d}/{name}": value for i, (name, value) in enumerate(trained.weights.items())
    }
    description = trained.description()
    del description["origin"]
    archive.write(path, arrays, {**description, "num_classes": len(trained.class_names)})


def pixels(count, size=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3)).astype(np.float32)


def reference(images, name="resnet18", weights=None):
    """Returns the logits of the reference for `tensors(name)` and pixels of 0 to 255."""
    return torchvision_reference.logits(
        name, weights or tensors(name), (images / 255 - MEAN) / DEVIATION
    )


def assert_close(actual, expected):
    """Asserts that logits agree to 1e-4 of the largest one."""
    assert actual.shape == expected.shape
    # Logits near zero would agree with anything.
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))
