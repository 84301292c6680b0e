"""Decides in which type an optimizer sends its gradients, and how its loss is scaled.

| model computes in | `compression` | gradients are sent in | loss scale |
|---|---|---|---|
| FP16 | auto | FP16 | dynamic |
| FP32, BF16 | auto | FP32 | none |
| FP32, BF16 | fp16 | FP16 | dynamic, on several ranks |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.comm.settings import WIRE_DTYPES

AUTO = "auto"
"""The value of `compression` and `loss_scale` that leaves the choice to `choose`."""

# The scale that Keras begins with.
_INITIAL_SCALE = 2.0**15
# If gradients are only sent in FP16, just those of the weights must fit. With this scale no recipe
# skips a step on the digits, and the gradients of a ResNet-50 with a zero last gamma keep their
# precision on 256 ranks (docs/communication.md).
_INITIAL_SCALE_FOR_SENDING = 2.0**12


@dataclasses.dataclass(frozen=True)
class GradientPrecision:
    """How the gradients of one optimizer are sent and scaled.

    Attributes:
      wire_dtype: Name of the dtype in which gradients are sent.
      initial_scale: Factor by which the loss is multiplied at first; 1 does not scale.
      is_scale_dynamic: Whether the factor changes, see `LossScale`.
    """

    wire_dtype: str
    initial_scale: float
    is_scale_dynamic: bool


def choose(
    compression: str, loss_scale: str | float, *, computes_in_float16: bool, num_ranks: int
) -> GradientPrecision:
    """Returns how gradients are sent and scaled.

    In FP16, small gradients become 0, so the loss is scaled wherever gradients are in FP16. Other
    models send what they compute, which gives the result of one process.

    Args:
      compression: "auto", "none", "fp16" or "bf16".
      loss_scale: "auto", "dynamic" or a number.
      computes_in_float16: Whether the model computes gradients in FP16.
      num_ranks: Number of ranks; a single one sends nothing.

    Reference:
      Lu et al. §2.2.2; Micikevicius et al., Mixed Precision Training.
    """
    if compression == AUTO:
        compression = "fp16" if computes_in_float16 else "none"
    wire_dtype = WIRE_DTYPES[compression]
    if loss_scale not in (AUTO, "dynamic"):
        return GradientPrecision(wire_dtype, float(loss_scale), False)
    sends_float16 = num_ranks > 1 and wire_dtype == "float16"
    if loss_scale == AUTO and not (computes_in_float16 or sends_float16):
        return GradientPrecision(wire_dtype, 1.0, False)
    initial_scale = _INITIAL_SCALE if computes_in_float16 else _INITIAL_SCALE_FOR_SENDING
    return GradientPrecision(wire_dtype, initial_scale, True)


def computes_in_float16(model: keras.Model, variables: Sequence[keras.Variable]) -> bool:
    """Returns whether gradients of variables are computed in FP16.

    If they are all trainable variables of the model, any of its layers counts, because the
    gradients pass through it. Otherwise the model has several optimizers, such as those of the two
    networks of a GAN, and only the layers that own the variables count.

    Args:
      model: The model to which the variables belong.
      variables: Trainable variables of one optimizer; empty if they are not known.
    """
    layers = [
        layer for layer in private_api.flatten_layers(model) if layer.compute_dtype == "float16"
    ]
    ids = {id(variable) for variable in variables}
    if not ids or all(id(variable) in ids for variable in model.trainable_variables):
        return bool(layers)
    for layer in layers:
        # A model around several networks has the variables of all of them.
        is_owner = not isinstance(layer, keras.Model)
        if is_owner and any(id(variable) in ids for variable in layer.trainable_variables):
            return True
    return False
