"""Builds a network by a function of the user's."""

from __future__ import annotations

import pkgutil

import keras

from hybrid_imagenet.errors import UserError


def build(target: str, num_classes: int, image_size: int | None, precision: str) -> keras.Model:
    """Calls MODULE:FUNCTION with `num_classes` and `image_size`, under the precision's policy.

    Returns:
      The Keras model that it returns, from images [b, image_size, image_size, 3], normalized as for ImageNet, to logits
      [b, num_classes] in any floating type; they are cast to FP32 where they are not.

    Raises:
      UserError: if there is no such function, it does not take these arguments, or returns something else.
    """
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--model={target}: {error}; give MODULE:FUNCTION of a module that Python can import") from None
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        model = function(num_classes=num_classes, image_size=image_size)
    except TypeError as error:
        raise UserError(f"--model={target}: {error}; it is called with num_classes and image_size") from None
    finally:
        keras.config.set_dtype_policy(policy)
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if not outputs:
        raise UserError(
            f"--model={target}: it returned {type(model).__name__}, not a functional or sequential Keras model"
        )
    if tuple(model.output_shape) != (None, num_classes):
        raise UserError(f"--model={target}: its output has shape {model.output_shape}, not (None, {num_classes})")
    if outputs[0].dtype != "float32":
        model = keras.Model(model.inputs, keras.layers.Activation("linear", dtype="float32")(outputs[0]))
    return model
