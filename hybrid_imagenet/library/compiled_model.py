"""Finds the optimizers that a Keras model trains with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer


def optimizers(model: keras.Model) -> dict[str, Any]:
    """Returns the distributed optimizers that a model and the models inside of it hold, each once,
    by attribute.

    `optimizer` is that of `compile`. Programs with two, such as GANs, keep them in other
    attributes, in lists or in dictionaries. Without a distributed one it returns what `compile`
    has.
    """
    found: dict[str, Any] = {}
    for part in (
        layer for layer in private_api.flatten_layers(model) if isinstance(layer, keras.Model)
    ):
        for name, value in _values(part):
            if isinstance(value, DistributedOptimizer) and all(
                value is not other for other in found.values()
            ):
                found[name if name not in found else f"{part.name}_{name}"] = value
    compiled = getattr(model, "optimizer", None)
    return found if found or compiled is None else {"optimizer": compiled}


def distributed(model: keras.Model) -> dict[str, DistributedOptimizer]:
    """Returns those of its `optimizers` that sum gradients over ranks."""
    found = optimizers(model).items()
    return {
        name: optimizer for name, optimizer in found if isinstance(optimizer, DistributedOptimizer)
    }


def trains_as_keras(model: keras.Model) -> bool:
    """Whether a model has Keras's own `train_step`, which updates all trainable variables with one
    optimizer.
    """
    return type(model).train_step is keras.Model.train_step


def _values(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yields a model's attributes and what lists and dictionaries among them hold, by name."""
    for name, value in vars(model).items():
        if name.startswith("_self_"):  # TensorFlow's notes of the same objects
            continue
        yield name, value
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}_{number}", item) for number, item in enumerate(value))
        elif isinstance(value, dict):
            yield from ((f"{name}_{key}", item) for key, item in value.items())
