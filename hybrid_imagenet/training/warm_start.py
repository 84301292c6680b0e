"""Begins a run with the weights of another: of a checkpoint, a run, or a file of another library."""

from __future__ import annotations

import pathlib

import keras
import numpy as np

from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.data import device
from hybrid_imagenet.errors import UserError


def strides_in_1x1(path: str | None) -> bool:
    """Returns whether a file's network strides in the first convolution of a block, as keras.applications' do."""
    return path is not None and path.endswith(".h5")


def freeze(network: keras.Model, prefixes: tuple[str, ...]) -> None:
    """Leaves the layers out of training whose names begin with one of the prefixes.

    Raises:
      UserError: for a prefix that no layer with weights begins with, or if nothing is left to train.
    """
    layers = [layer for layer in network._flatten_layers(include_self=False) if layer.weights]
    for prefix in prefixes:
        chosen = [layer for layer in layers if layer.name.startswith(prefix)]
        if not chosen:
            names = ", ".join(layer.name for layer in layers[:8])
            raise UserError(f"--freeze={prefix}: no layer's name begins so; the first ones are {names}")
        for layer in chosen:
            layer.trainable = False
    if not network.trainable_variables:
        raise UserError(f"--freeze={','.join(prefixes)}: nothing is left to train; leave the last layer out")


def load(path: str, network: keras.Model) -> list[str]:
    """Gives a network the weights of a file, but for a head of another number of classes.

    Weights made for other pixel means and deviations are turned into ones for this program's: the first convolution's
    are scaled channel by channel.

    Args:
      path: as for `checkpoints.pretrained.load`.
      network: of the same architecture; changed in place.

    Returns:
      Lines for the user: what was read, and what begins anew.

    Raises:
      UserError: if the file cannot be used or holds another network.
    """
    lines: list[str] = []
    trained = pretrained.load(pathlib.Path(path), lines.append)
    found = dict(trained.weights or {})
    head = {v.path for v in network.layers[-1].weights} or {v.path for v in network.layers[-2].weights}
    fresh = []
    for variable in network.weights:
        value = found.get(variable.path)
        if value is not None and value.shape == tuple(variable.shape):
            continue
        if variable.path not in head:
            problem = "is missing" if value is None else f"has shape {value.shape}"
            raise UserError(
                f"--init_from={path}: {variable.path} {problem} there, this network needs {tuple(variable.shape)}; "
                f"give a file of the same network (that is {trained.model}, width {trained.width}, stem {trained.stem})"
            )
        fresh.append(variable.path)
    first = next(v for v in network.weights if len(v.shape) == 4)
    for variable in network.weights:
        if variable.path in head and fresh:
            continue  # all of the head or none of it
        value = found[variable.path]
        if variable is first:
            value = value * _for_our_pixels(trained)[:, None]
        variable.assign(value)
    lines.append(f"weights of {trained.origin} ({trained.model}, {len(trained.class_names)} classes)")
    if fresh:
        lines.append(f"the last layer begins anew, for another number of classes: {', '.join(fresh)}")
    return lines


def _for_our_pixels(trained: pretrained.Trained) -> np.ndarray:
    """Returns the factor on each input channel of the first convolution, float32 [3].

    A network that sees (x - m) / s gives the same for (x - m) / d with kernels multiplied by d / s. The means of all
    files are those of ImageNet, to rounding.
    """
    return (np.array(device.DEVIATION) / np.array(trained.pixel_deviation)).astype(np.float32)
