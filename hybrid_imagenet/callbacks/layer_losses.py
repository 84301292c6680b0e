"""Rejects losses of layers whose gradient would depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import SharedError


def reject_losses_of_several_values(model: keras.Model) -> None:
    """Checks what layers have passed to `add_loss`, after the first step of several ranks.

    Keras sums the values of such a loss. If there is one for each example, the sum over the batch
    of one rank is only a part of that over the batches of all ranks.

    Args:
      model: Model that `fit` trains. A `compute_loss` that the user wrote may take a mean, so such
        a model is not checked.

    Raises:
      SharedError: On all ranks, with the layer and the shape of its loss.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        return
    if not any(map(_has_several_values, model.losses)):
        return
    # Layers come after the model or layer that contains them, so the last one is the innermost.
    for layer in reversed(private_api.flatten_layers(model)):
        for loss in filter(_has_several_values, layer.losses):
            raise SharedError(
                f"The layer {layer.name!r} adds a loss of the shape {loss.shape}, not one value."
                " Keras would sum it over the examples of one rank, so the update would change with"
                " the number of ranks. Pass one value to add_loss: the mean, keras.ops.mean(loss),"
                " or keras.ops.sum(loss) * hybrid_imagenet.size() for the sum over the examples of"
                " all ranks."
            )


def _has_several_values(loss: Any) -> bool:
    # A regularizer of yours may return a number.
    shape = tf.TensorShape(getattr(loss, "shape", ()))
    return bool(shape.rank) and shape.num_elements() != 1
