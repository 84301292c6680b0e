"""Begins a run with trained weights, of a checkpoint, a run or a file of another library."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.data import listing
from hybrid_imagenet.errors import UserError

# An error for an unknown layer names this many of the layers that there are.
MAX_NAMED_LAYERS = 8


def freeze(network: keras.Model, prefixes: tuple[str, ...]) -> None:
    """Excludes layers from training.

    Args:
      network: Network whose layers get `trainable=False`.
      prefixes: Prefixes of the names of these layers.

    Raises:
      UserError: For a prefix with which no layer with weights begins, or if no weights would be
        left to train.
    """
    layers = [
        layer for layer in private_api.flatten_layers(network, include_self=False) if layer.weights
    ]
    for prefix in prefixes:
        matching_layers = [layer for layer in layers if layer.name.startswith(prefix)]
        if not matching_layers:
            names = ", ".join(layer.name for layer in layers[:MAX_NAMED_LAYERS])
            raise UserError(
                f"--freeze={prefix}: no name of a layer begins with it. The first layers are"
                f" {names}."
            )
        for layer in matching_layers:
            layer.trainable = False
    if not network.trainable_variables:
        raise UserError(
            f"--freeze={','.join(prefixes)}: nothing is left to train. Omit the last layer."
        )


def load(path: str, network: keras.Model, class_names: Sequence[str]) -> list[str]:
    """Loads the weights of a file into a network.

    The last layer keeps its initial weights if the file has a different number of classes.

    Args:
      path: See `checkpoints.pretrained.load`.
      network: Network of the same architecture; changed in place.
      class_names: The classes of the data, in the order of the scores.

    Returns:
      Lines for the user about the weights that were read, and those that were not.

    Raises:
      UserError: If the file cannot be used or is of another network.
    """
    lines: list[str] = []
    trained = pretrained.load(pathlib.Path(path), lines.append)
    weights = dict(trained.weights or {})
    # Layers without weights may follow the classifier, such as a cast or a reshape.
    head_layer = [layer for layer in network.layers if layer.weights][-1]
    head = {variable.path for variable in head_layer.weights}
    initialized = []
    for variable in network.weights:
        value = weights.get(variable.path)
        if value is not None and value.shape == tuple(variable.shape):
            continue
        if variable.path not in head:
            problem = "is missing" if value is None else f"has shape {value.shape}"
            raise UserError(
                f"--init_from={path}: {variable.path} {problem} there, but this network needs"
                f" {tuple(variable.shape)}. Use a file of the same network (that file is of"
                f" {trained.model}, width {trained.width}, stem {trained.stem})."
            )
        initialized.append(variable.path)
    for variable in network.weights:
        # Kernel and bias of the last layer belong together, so it is loaded as a whole or not.
        keeps_initial_value = variable.path in head and initialized
        if not keeps_initial_value:
            variable.assign(weights[variable.path])
    lines.append(
        f"weights of {trained.origin} ({trained.model}, {len(trained.class_names)} classes)"
    )
    difference = listing.class_name_difference(trained.class_names, class_names)
    if difference and not initialized:
        lines.append(
            f"its classes have other names ({difference}), and the last layer is loaded all the"
            " same: classes are matched by number"
        )
    if initialized:
        lines.append(
            "the last layer is initialized, because the number of classes differs:"
            f" {', '.join(initialized)}"
        )
    return lines
