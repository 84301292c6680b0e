"""ResNet and AlexNet with batch normalization, as Keras models."""

from __future__ import annotations

import pkgutil
import sys
import traceback
from typing import Any

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import alexnet, resnet
from hybrid_imagenet.models.blocks import Builder
from hybrid_imagenet.numerics.depths import DEPTHS, STEMS, WIDTH

NAMES = (*DEPTHS, "alexnet_bn")


def create(
    name: str,
    num_classes: int,
    image_size: int | None,
    *,
    width: int = WIDTH,
    stem: str = "imagenet",
    **settings: Any,
) -> keras.Model:
    """Builds a network that maps images to class scores.

    Args:
      name: one of `NAMES`, or a function of the user's as MODULE:FUNCTION, which is called with `num_classes` and
        `image_size`; of all that follows, only precision and seed act on it.
      num_classes: number of class scores.
      image_size: side of the square input in pixels; None makes a ResNet that takes any.
      width: channels of a ResNet's first stage; each later one has twice as many.
      stem: of a ResNet, one of `numerics.depths.STEMS`.
      settings: the attributes of `blocks.Builder`.

    Returns:
      A functional model from [b, image_size, image_size, 3], normalized, in the compute type of `precision`, to
      FP32 logits [b, num_classes].

    Raises:
      UserError: for a name, precision or stem that does not exist, or an image too small for the network.
    """
    builder = Builder(**settings)
    if ":" in name:
        return _of_user(name, num_classes, image_size, builder)
    if name not in NAMES:
        raise UserError(f"--model={name}: choose one of {', '.join(NAMES)}")
    if stem not in STEMS:
        raise UserError(f"--stem={stem}: choose one of {', '.join(STEMS)}")
    if name == "alexnet_bn":
        return alexnet.build(builder, num_classes, image_size)
    return resnet.build(builder, name, num_classes, image_size, width=width, stem=stem)


_SQUASHES = {"softmax", "softmax_v2", "sigmoid"}
"""Names of the functions, operations and layers of Keras and TensorFlow that make probabilities."""


def _of_user(target: str, num_classes: int, image_size: int | None, builder: Builder) -> keras.Model:
    """Calls MODULE:FUNCTION with `num_classes` and `image_size`, under the precision's policy and the seed.

    Returns:
      The Keras model that it returns, from images [b, image_size, image_size, 3], normalized as for ImageNet, to logits
      [b, num_classes] in any floating type; they are cast to FP32 where they are not.

    Raises:
      UserError: if there is no such function, it does not take these arguments, fails, or returns something else.
    """
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--model={target}: {error}; give MODULE:FUNCTION of a module that Python can import") from None
    except (Exception, SystemExit) as error:
        raise _failure_of_user(target, error) from None
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(builder.precision)
    keras.utils.set_random_seed(builder.seed % 2**32)
    try:
        model = function(num_classes=num_classes, image_size=image_size)
    except TypeError as error:
        raise UserError(f"--model={target}: {error}; it is called with num_classes and image_size") from None
    except (Exception, SystemExit) as error:
        raise _failure_of_user(target, error) from None
    finally:
        keras.config.set_dtype_policy(policy)
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if not outputs:
        raise UserError(
            f"--model={target}: it returned {type(model).__name__}, not a functional or sequential Keras model"
        )
    _check_input(target, model, image_size)
    if tuple(model.output_shape) != (None, num_classes):
        raise UserError(f"--model={target}: its output has shape {model.output_shape}, not (None, {num_classes})")
    if model.losses or any(v.constraint is not None for v in model.trainable_variables):
        raise UserError(f"--model={target}: regularizers and constraints are not applied; use --weight_decay")
    if any(getattr(layer, "synchronized", False) for layer in private_api.flatten_layers(model)):
        raise UserError(f"--model={target}: each rank normalizes its own batch; omit synchronized=True")
    scores = outputs[0]
    last, number = private_api.origin(scores)
    while inner := getattr(last, "outputs", None):  # `last` is a model inside the model
        last, number = private_api.origin(inner[number])
    if _SQUASHES & {type(last).__name__.lower(), getattr(getattr(last, "activation", None), "__name__", "")}:
        raise UserError(
            f"--model={target}: the layer {last.name} gives probabilities, not logits; omit its activation "
            "(classifier_activation=None in keras.applications)"
        )
    if outputs[0].dtype != "float32":
        model = keras.Model(model.inputs, keras.layers.Activation("linear", dtype="float32")(outputs[0]))
    return model


def _failure_of_user(target: str, error: BaseException) -> UserError:
    """Returns a message for an error in the user's module: its type, text and line."""
    # Frames of this package and of importlib come first, those of libraries that the module calls last.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    module = sys.modules.get(target.partition(":")[0])
    file = getattr(module, "__file__", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    where = f" in {own[-1].filename}, line {own[-1].lineno}" if own else ""
    if isinstance(error, SystemExit):
        return UserError(f"--model={target}: it called sys.exit({error.code!r}){where}. Return a Keras model instead.")
    return UserError(f"--model={target}: {type(error).__name__}{where}: {error}. Correct the module.")


def _check_input(target: str, model: keras.Model, image_size: int | None) -> None:
    """Raises UserError unless a model takes one batch of RGB images of this size."""
    wanted = (None, image_size, image_size, 3)
    shapes = [tuple(tensor.shape) for tensor in model.inputs]
    if len(shapes) == 1 and len(shapes[0]) == len(wanted):
        batch, *sides_and_channels = shapes[0]
        if batch is None and all(
            size is None or size == needed for size, needed in zip(sides_and_channels, wanted[1:], strict=True)
        ):
            return
        _, height, width, channels = shapes[0]
        if batch is None and height == width and channels in (None, 3):
            raise UserError(
                f"--model={target}: its input has shape {shapes[0]}, not {wanted}. Take the size from the argument "
                f"image_size, or set --image_size={height}."
            )
    found = f"its input has shape {shapes[0]}" if len(shapes) == 1 else f"it has {len(shapes)} inputs, not one"
    raise UserError(f"--model={target}: {found}; it is called with images of shape {wanted}.")


_APART = 0x9E3779B9  # between the seeds of ranks, which Keras takes modulo 2^31 - 2


def draw_own_numbers(network: keras.Model, rank: int) -> None:
    """Gives each `keras.random.SeedGenerator` of the network, such as dropout's, a seed of this rank's own.

    It is called once, after the broadcast of rank 0's state. Rank 0 keeps its seeds, which checkpoints hold.
    """
    for state in network.variables:
        if state.name == "seed_generator_state":  # a seed and a counter, int64 [2]
            state.assign_add([rank * _APART, 0])
