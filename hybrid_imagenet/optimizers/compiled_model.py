"""Finds the optimizers that a Keras model trains with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer


def optimizers(model: keras.Model) -> dict[str, Any]:
    """Returns the distributed optimizers of a model and of the models inside it.

    `optimizer` is that of `compile`. Programs with several optimizers, such as GANs, keep the
    others in attributes, lists or dictionaries. Without a distributed optimizer it returns that of
    `compile`, if there is one.

    Returns:
      Each optimizer once, by the name of its attribute.
    """
    by_name: dict[str, Any] = {}
    for layer in private_api.flatten_layers(model):
        if not isinstance(layer, keras.Model):
            continue
        for name, value in attributes(layer):
            is_listed = any(value is optimizer for optimizer in by_name.values())
            if isinstance(value, DistributedOptimizer) and not is_listed:
                by_name[name if name not in by_name else f"{layer.name}_{name}"] = value
    compiled_optimizer = getattr(model, "optimizer", None)
    if not by_name and compiled_optimizer is not None:
        return {"optimizer": compiled_optimizer}
    return by_name


def distributed(model: keras.Model) -> dict[str, DistributedOptimizer]:
    """Returns only the `optimizers` that sum gradients over ranks."""
    return {
        name: optimizer
        for name, optimizer in optimizers(model).items()
        if isinstance(optimizer, DistributedOptimizer)
    }


def request_sum(model: keras.Model) -> RequestSum | None:
    """Returns what sums requests in each update of the distributed optimizers, if it exists."""
    sums = (optimizer.reducer.request_sum for optimizer in distributed(model).values())
    return next((found for found in sums if found is not None), None)


def updates_applied(model: keras.Model) -> int:
    """Returns the updates of the optimizer that has made most of them; waits for a GPU.

    Checkpoints contain the number, so it counts those of all sessions.
    """
    counts = [int(optimizer.iterations) for optimizer in optimizers(model).values()]
    return max(counts, default=0)


def trains_as_keras(model: keras.Model) -> bool:
    """Returns whether a model has the `train_step` of Keras.

    It updates all trainable variables with the optimizer of `compile`.
    """
    return type(model).train_step is keras.Model.train_step


def attributes(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yields attributes of a layer by name, and the items of lists and dictionaries in them."""
    for name, value in vars(layer).items():
        # TensorFlow tracks the same objects in attributes with this prefix.
        if name.startswith("_self_"):
            continue
        yield name, value
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield f"{name}_{index}", item
        elif isinstance(value, dict):
            for key, item in value.items():
                yield f"{name}_{key}", item
