"""Builds a network from MODULE:FUNCTION of the user's, and checks that the program can train it."""

from __future__ import annotations

import pkgutil
import sys
import traceback

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.blocks import Builder

_SQUASHES = {"softmax", "softmax_v2", "sigmoid"}
"""Names of the functions, operations and layers of Keras and TensorFlow that make probabilities."""


def create(target: str, num_classes: int, image_size: int | None, builder: Builder) -> keras.Model:
    """Calls MODULE:FUNCTION with `num_classes` and `image_size`, under the precision's policy and
    the seed.

    Returns:
      The Keras model that it returns, from images [b, image_size, image_size, 3], normalized as for
      ImageNet, to logits [b, num_classes] in any floating type; they are cast to FP32 where they
      are not.

    Raises:
      UserError: if there is no such function, it does not take these arguments, fails, or returns
        something else.
    """
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"--model={target}: {error}; give MODULE:FUNCTION of a module that Python can import"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failurecreate(target, error) from None
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(builder.precision)
    keras.utils.set_random_seed(builder.seed % 2**32)
    try:
        model = function(num_classes=num_classes, image_size=image_size)
    except TypeError as error:
        raise UserError(
            f"--model={target}: {error}; it is called with num_classes and image_size"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failurecreate(target, error) from None
    finally:
        keras.config.set_dtype_policy(policy)
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if not outputs:
        raise UserError(
            f"--model={target}: it returned {type(model).__name__}, not a functional or sequential"
            " Keras model"
        )
    _check_input(target, model, image_size)
    if tuple(model.output_shape) != (None, num_classes):
        raise UserError(
            f"--model={target}: its output has shape {model.output_shape}, not (None,"
            f" {num_classes})"
        )
    if model.losses or any(v.constraint is not None for v in model.trainable_variables):
        raise UserError(
            f"--model={target}: regularizers and constraints are not applied; use --weight_decay"
        )
    if any(getattr(layer, "synchronized", False) for layer in private_api.flatten_layers(model)):
        raise UserError(
            f"--model={target}: each rank normalizes its own batch; omit synchronized=True"
        )
    scores = outputs[0]
    last, number = private_api.producing_operation(scores)
    while inner := getattr(last, "outputs", None):  # `last` is a model inside the model
        last, number = private_api.producing_operation(inner[number])
    if _SQUASHES & {
        type(last).__name__.lower(),
        getattr(getattr(last, "activation", None), "__name__", ""),
    }:
        raise UserError(
            f"--model={target}: the layer {last.name} gives probabilities, not logits; omit its"
            " activation (classifier_activation=None in keras.applications)"
        )
    if outputs[0].dtype != "float32":
        model = keras.Model(
            model.inputs, keras.layers.Activation("linear", dtype="float32")(outputs[0])
        )
    return model


def _failurecreate(target: str, error: BaseException) -> UserError:
    """Returns a message for an error in the user's module: its type, text and line."""
    # Frames of this package and of importlib come first, those of libraries that the module calls
    # last.
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__
    ]
    module = sys.modules.get(target.partition(":")[0])
    file = getattr(module, "__file__", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    where = f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
    if isinstance(error, SystemExit):
        return UserError(
            f"--model={target}: it called sys.exit({error.code!r}){where}. Return a Keras model"
            " instead."
        )
    return UserError(
        f"--model={target}: {type(error).__name__}{where}: {error}. Correct the module."
    )


def _check_input(target: str, model: keras.Model, image_size: int | None) -> None:
    """Raises UserError unless a model takes one batch of RGB images of this size."""
    wanted = (None, image_size, image_size, 3)
    shapes = [tuple(tensor.shape) for tensor in model.inputs]
    if len(shapes) == 1 and len(shapes[0]) == len(wanted):
        batch, *sides_and_channels = shapes[0]
        if batch is None and all(
            size is None or size == needed
            for size, needed in zip(sides_and_channels, wanted[1:], strict=True)
        ):
            return
        _, height, width, channels = shapes[0]
        if batch is None and height == width and channels in (None, 3):
            raise UserError(
                f"--model={target}: its input has shape {shapes[0]}, not {wanted}. Take the size"
                f" from the argument image_size, or set --image_size={height}."
            )
    found = (
        f"its input has shape {shapes[0]}"
        if len(shapes) == 1
        else f"it has {len(shapes)} inputs, not one"
    )
    raise UserError(f"--model={target}: {found}; it is called with images of shape {wanted}.")
