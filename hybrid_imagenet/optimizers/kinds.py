"""Classifies trainable variables as kernel, bias or normalization parameter.

The layer that owns a variable decides. Weight decay and LARS depend on it (Jia et al. §3.2; Lu et
al. §2.2.1).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError

_NORMALIZATIONS = (
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
    keras.layers.RMSNormalization,
)

# Ends of the names of variables that Keras's layers use as biases and in normalization.
_NAMES_OF_VECTORS = ("bias", "beta", "gamma", "scale")


class ParameterKind(enum.Enum):
    """The role of a trainable variable."""

    KERNEL = "kernel"
    BIAS = "bias"
    NORM_SCALE = "norm_scale"
    NORM_OFFSET = "norm_offset"


def classify(model: keras.Model) -> list[ParameterKind]:
    """Returns the kind of each of `model.trainable_variables`, in their order.

    Names of variables play no part: the scale and offset of a normalization layer are the variables
    that the layer itself uses as such, a bias is the variable that its layer adds, and everything
    else is a kernel. The vector `gamma` of any other layer is a scale too, such as that of
    ConvNeXt's LayerScale, which starts at 1e-6: weight decay and LARS would keep it there.
    """
    kinds: dict[int, ParameterKind] = {}
    for layer in private_api.flatten_layers(model):
        if isinstance(layer, _NORMALIZATIONS):
            roles = {
                ParameterKind.NORM_SCALE: getattr(layer, "gamma", getattr(layer, "scale", None)),
                ParameterKind.NORM_OFFSET: getattr(layer, "beta", None),
            }
        else:
            roles = {ParameterKind.BIAS: getattr(layer, "bias", None)}
            gamma = getattr(layer, "gamma", None)
            if isinstance(gamma, keras.Variable) and len(gamma.shape) == 1:
                roles[ParameterKind.NORM_SCALE] = gamma
        kinds |= {id(v): kind for kind, v in roles.items() if isinstance(v, keras.Variable)}
    return [kinds.get(id(v), ParameterKind.KERNEL) for v in model.trainable_variables]


def classify_by_rank(variables: Sequence[keras.Variable]) -> list[ParameterKind]:
    """Classifies variables without their model, by the number of their axes.

    Matrices and convolutions are kernels, vectors and scalars biases.

    Raises:
      UserError: For a matrix that seems to be a bias or a normalization parameter, by its name.
    """
    for variable in variables:
        if len(variable.shape) > 1 and variable.name.endswith(_NAMES_OF_VECTORS):
            raise UserError(
                f"The optimizer does not know whether {variable.path}, of shape"
                f" {tuple(variable.shape)}, is a kernel or a bias, because it does not know the"
                " model. Pass callbacks=hybrid_imagenet.callbacks.default_callbacks() to fit, or"
                " call hybrid_imagenet.broadcast_model(model) before the first step."
            )
    return [ParameterKind.KERNEL if len(v.shape) > 1 else ParameterKind.BIAS for v in variables]
