"""Reads and writes weights of keras.applications' ResNet50, ResNet101 and ResNet152, as .h5 files.

These networks differ from torchvision's in four ways. Three are mapped exactly: their convolutions have biases (which
move into the means of the normalizations that follow), they take BGR images (the stem's kernels are turned around) on
a scale of their own (`PIXEL_MEAN`, `PIXEL_DEVIATION`), and epsilon is 1.001e-5. The fourth is the network itself: a
block's stride lies in its first 1x1 convolution (`models.create(..., stride_in_1x1=True)`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.weights.layers import CLASSIFIER, NORM_VARIABLES, Weights, units

EPSILON = 1.001e-5
# `preprocess_input` subtracts these means (RGB here) from pixels of 0 to 255 and does not divide.
PIXEL_MEAN = (123.68 / 255, 116.779 / 255, 103.939 / 255)
PIXEL_DEVIATION = (1 / 255, 1 / 255, 1 / 255)
_NETWORKS = {"resnet50": "ResNet50", "resnet101": "ResNet101", "resnet152": "ResNet152"}
_FEATURES = 2048
_PREDICTIONS = "predictions"


def read(path: Path, *, bgr: bool = True) -> tuple[str, dict[str, np.ndarray]]:
    """Reads a file; returns the name of the network and its weights for RGB images.

    Args:
      path: weights in Keras 3's form or the older one.
      bgr: whether the stem takes BGR images.

    Raises:
      UserError: if it cannot be read, or does not hold one of these networks with its classifier.
    """
    model, classes = _identify(path)
    network = _network(model, classes)
    try:
        network.load_weights(path)
    except (ValueError, KeyError, OSError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{path}: does not hold weights of keras.applications.{_NETWORKS[model]} ({line})") from None
    weights: dict[str, np.ndarray] = {}
    for unit in units(model):
        kernel, bias = network.get_layer(f"{unit.applications}_conv").get_weights()
        norm = network.get_layer(f"{unit.applications}_bn").get_weights()
        weights[f"{unit.here}_conv/kernel"] = kernel
        weights |= {f"{unit.here}_bn/{name}": value for name, value in zip(NORM_VARIABLES, norm, strict=True)}
        weights[f"{unit.here}_bn/moving_mean"] = norm[2] - bias
    kernel, bias = network.get_layer(_PREDICTIONS).get_weights()
    weights |= {f"{CLASSIFIER}/kernel": kernel, f"{CLASSIFIER}/bias": bias}
    return model, _turned(weights) if bgr else weights


def write(path: Path, model: str, weights: Weights, *, bgr: bool = True) -> None:
    """Writes weights for `keras.applications.<network>(weights=path, classes=...)`; biases of convolutions are 0.

    Args:
      path: ends in `.weights.h5`.
      model: resnet50, resnet101 or resnet152.
      weights: for RGB images, stride in the 1x1 convolutions, and an epsilon of 1.001e-5.
      bgr: whether the stem is to take BGR images.

    Raises:
      UserError: if keras.applications has no such network.
    """
    if model not in _NETWORKS:
        raise UserError(f"keras.applications has no {model}, only {', '.join(_NETWORKS)}; export to .keras")
    weights = _turned(weights) if bgr else weights
    network = _network(model, len(weights[f"{CLASSIFIER}/bias"]))
    for unit in units(model):
        kernel = weights[f"{unit.here}_conv/kernel"]
        norm = [weights[f"{unit.here}_bn/{name}"] for name in NORM_VARIABLES]
        network.get_layer(f"{unit.applications}_conv").set_weights([kernel, np.zeros(kernel.shape[-1], np.float32)])
        network.get_layer(f"{unit.applications}_bn").set_weights(norm)
    classifier = [weights[f"{CLASSIFIER}/kernel"], weights[f"{CLASSIFIER}/bias"]]
    network.get_layer(_PREDICTIONS).set_weights(classifier)
    network.save_weights(path)


def _network(model: str, classes: int) -> keras.Model:
    return getattr(keras.applications, _NETWORKS[model])(weights=None, classes=classes)


def _turned(weights: Weights) -> dict[str, np.ndarray]:
    """The weights for images with their three channels in the opposite order."""
    name = "stem_conv/kernel"
    return {**weights, name: np.ascontiguousarray(weights[name][:, :, ::-1])}


def _identify(path: Path) -> tuple[str, int]:
    """The network, told by its number of convolutions, and the number of classes."""
    shapes: list[tuple[int, ...]] = []

    def note(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            shapes.append(item.shape)

    try:
        with h5py.File(path) as file:
            file.visititems(note)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as an HDF5 file ({error})") from None
    convolutions = sum(len(shape) == 4 for shape in shapes)
    classes = [shape[1] for shape in shapes if len(shape) == 2 and shape[0] == _FEATURES]
    model = next((name for name in _NETWORKS if len(units(name)) == convolutions), None)
    if model is None or len(classes) != 1:
        names = ", ".join(_NETWORKS.values())
        raise UserError(
            f"{path}: does not hold one of keras.applications' {names} with its classifier "
            f"({convolutions} convolutions, {len(classes)} classifiers)"
        )
    return model, classes[0]
