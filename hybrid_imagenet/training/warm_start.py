"""Begins a run with the weights of another: of a checkpoint, a run, or a file of another
library.
"""

from __future__ import annotations

import pathlib

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.errors import UserError


def freeze(network: keras.Model, prefixes: tuple[str, ...]) -> None:
    """Leaves the layers out of training whose names begin with one of the prefixes.

    Raises:
      UserError: for a prefix that no layer with weights begins with, or if nothing is left to
        train.
    """
    layers = [
        layer for layer in private_api.flatten_layers(network, include_self=False) if layer.weights
    ]
    for prefix in prefixes:
        chosen = [layer for layer in layers if layer.name.startswith(prefix)]
        if not chosen:
            names = ", ".join(layer.name for layer in layers[:8])
            raise UserError(
                f"--freeze={prefix}: no layer's name begins so; the first ones are {names}"
            )
        for layer in chosen:
            layer.trainable = False
    if not network.trainable_variables:
        raise UserError(
            f"--freeze={','.join(prefixes)}: nothing is left to train; omit the last layer"
        )


def load(path: str, network: keras.Model) -> list[str]:
    """Gives a network the weights of a file, but for a head of another number of classes.

    Args:
      path: as for `checkpoints.pretrained.load`.
      network: of the same architecture; changed in place.

    Returns:
      Lines for the user: what was read, and what is initialized.

    Raises:
      UserError: if the file cannot be used or holds another network.
    """
    lines: list[str] = []
    trained = pretrained.load(pathlib.Path(path), lines.append)
    found = dict(trained.weights or {})
    # Layers without weights may follow the classifier, such as a cast or a reshape.
    head = {v.path for v in [layer for layer in network.layers if layer.weights][-1].weights}
    fresh = []
    for variable in network.weights:
        value = found.get(variable.path)
        if value is not None and value.shape == tuple(variable.shape):
            continue
        if variable.path not in head:
            problem = "is missing" if value is None else f"has shape {value.shape}"
            raise UserError(
                f"--init_from={path}: {variable.path} {problem} there, this network needs"
                f" {tuple(variable.shape)}; give a file of the same network (that is"
                f" {trained.model}, width {trained.width}, stem {trained.stem})"
            )
        fresh.append(variable.path)
    for variable in network.weights:
        if not (variable.path in head and fresh):  # all of the head or none of it
            variable.assign(found[variable.path])
    lines.append(
        f"weights of {trained.origin} ({trained.model}, {len(trained.class_names)} classes)"
    )
    if fresh:
        lines.append(
            f"the last layer is initialized, for another number of classes: {', '.join(fresh)}"
        )
    return lines
