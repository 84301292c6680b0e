"""Finds arrays of layers that differ between ranks although they are not weights."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.optimizers import compiled_model

_log = logging.getLogger(__name__)

_MAX_NAMED_CONSTANTS = 3
# NumPy's letters for the kinds of types whose bytes are their values.
_KINDS_OF_VALUES = "biufcSU"
# Keras keeps the losses of the last call here.
_NOT_CONSTANTS = ("_losses",)
_LAYERS_WITH_VOCABULARY = (
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
    keras.layers.TextVectorization,
)


def warn_of_different_constants(model: keras.Model, communicator: Communicator) -> None:
    """Warns on rank 0 if an array in an attribute of a layer differs; every rank calls it.

    An example is a mask that a layer draws by `np.random` when it is built. It is not a weight, so
    no broadcast makes it equal, and the ranks would average the gradients of different networks.
    It is only a warning, because such an array need not take part in the computation.

    Args:
      model: The network.
      communicator: Connects the ranks.
    """
    if communicator.size == 1:
        return
    digests_of_ranks = communicator.allgather_object(_digests(model))
    first = digests_of_ranks[0]
    differing = [
        name
        for name in first
        if any(digests.get(name, first[name]) != first[name] for digests in digests_of_ranks)
    ]
    if not differing or communicator.rank != 0:
        return
    hidden = len(differing) - _MAX_NAMED_CONSTANTS
    _log.warning(
        "Arrays of layers that are not weights differ between ranks (%s%s). If the model computes"
        " with them, the ranks train different networks (with Normalization, all train with what"
        " rank 0 has adapted to). Call keras.utils.set_random_seed with the same number on every"
        " rank before you build the model, and adapt layers to the same data.",
        ", ".join(differing[:_MAX_NAMED_CONSTANTS]),
        f" and {hidden} more" if hidden > 0 else "",
    )


def _digests(model: keras.Model) -> dict[str, str]:
    """Returns a digest of each array in the attributes of layers, and of vocabularies, by path."""
    digests = {}
    for layer in private_api.flatten_layers(model):
        if isinstance(layer, keras.layers.Normalization) and not _is_adapted(layer):
            # It may get the values of rank 0 by the broadcast.
            continue
        for name, value in compiled_model.attributes(layer):
            array = _as_array(value)
            if array is not None and not name.startswith(_NOT_CONSTANTS):
                content = f"{array.dtype} {array.shape}".encode() + array.tobytes()
                digests[f"{layer.path}.{name}"] = _digest(content)
        if isinstance(layer, _LAYERS_WITH_VOCABULARY):
            words = repr([str(word) for word in layer.get_vocabulary()])
            # `adapt` may have built it, without a path.
            digests[f"{layer.path or layer.name}.vocabulary"] = _digest(words.encode())
    return digests


def _is_adapted(layer: keras.layers.Normalization) -> bool:
    """Returns whether `adapt`, or weights that were loaded, have set the statistics of a layer."""
    mean = getattr(layer, "adapt_mean", None)
    if mean is None:
        return False
    return bool(np.any(mean.numpy() != 0) or np.any(layer.adapt_variance.numpy() != 1))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _as_array(value: Any) -> np.ndarray | None:
    """Returns a constant array or tensor as an array; None for other values, also variables."""
    if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
        # Others, such as handles and strings, have no value to compare.
        is_number = value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
        value = value.numpy() if is_number else None
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS_OF_VALUES:
        return value
    return None
