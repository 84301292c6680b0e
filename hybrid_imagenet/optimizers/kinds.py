"""Classifies trainable variables as kernel, bias or normalization parameter, from the layer that owns them.

Weight decay and LARS depend on it (Jia et al. §3.2; Lu et al. §2.2.1).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import keras

from hybrid_imagenet import private_api

_NORMALIZATIONS = (
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
    keras.layers.RMSNormalization,
)


class ParameterKind(enum.Enum):
    """The role of a trainable variable."""

    KERNEL = "kernel"
    BIAS = "bias"
    NORM_SCALE = "norm_scale"
    NORM_OFFSET = "norm_offset"


def classify(model: keras.Model) -> list[ParameterKind]:
    """The kind of each of `model.trainable_variables`, in their order.

    Names play no part: the scale and offset of a normalization layer are the variables that the layer itself uses as
    such, a bias is the variable that its layer adds, and all else is a kernel.
    """
    found: dict[int, ParameterKind] = {}
    for layer in private_api.flatten_layers(model):
        if isinstance(layer, _NORMALIZATIONS):
            roles = {
                ParameterKind.NORM_SCALE: getattr(layer, "gamma", getattr(layer, "scale", None)),
                ParameterKind.NORM_OFFSET: getattr(layer, "beta", None),
            }
        else:
            roles = {ParameterKind.BIAS: getattr(layer, "bias", None)}
        found |= {id(v): kind for kind, v in roles.items() if isinstance(v, keras.Variable)}
    return [found.get(id(v), ParameterKind.KERNEL) for v in model.trainable_variables]


def classify_by_rank(variables: Sequence[keras.Variable]) -> list[ParameterKind]:
    """A stand-in where no model is at hand: matrices and convolutions are kernels, vectors and scalars biases."""
    return [ParameterKind.KERNEL if len(v.shape) > 1 else ParameterKind.BIAS for v in variables]
