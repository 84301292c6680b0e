"""Builds a network by calling a user's function and checks that it can be trained."""

from __future__ import annotations

import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.blocks import Builder

# Lower-case names of the functions, operations and layers of Keras and TensorFlow that compute
# probabilities.
_PROBABILITY_FUNCTIONS = {"softmax", "softmax_v2", "sigmoid"}

# How many unnamed layers the import of each user's module has built, by automatic name. A function
# may use these layers, so its own must not get the same names. A module is imported only once, but
# every call of its functions must continue from the same numbers.
_layers_of_import: dict[str, Mapping[str, int]] = {}


def create(target: str, num_classes: int, image_size: int | None, builder: Builder) -> keras.Model:
    """Calls MODULE:FUNCTION with `num_classes` and `image_size`.

    Args:
      target: MODULE:FUNCTION; the module must be importable.
      num_classes: Number of class scores.
      image_size: Side of the input in pixels.
      builder: Its precision is Keras's dtype policy during the call, and its seed the global seed.

    Returns:
      The Keras model of the function, from images [b, image_size, image_size, 3], normalized as for
      ImageNet, to logits [b, num_classes]. Logits of another type are cast to FP32.

    Raises:
      UserError: If there is no such function, it does not take these arguments, fails, or returns
        a model that cannot be trained.
    """
    function = _import_function(target)
    earlier_layers = _layers_of_import[_module_name(target)]
    return build_checked(target, function, num_classes, image_size, builder, earlier_layers)


def build_checked(
    target: str,
    function: Callable[..., Any],
    num_classes: int,
    image_size: int | None,
    builder: Builder,
    earlier_layers: Mapping[str, int] | None = None,
) -> keras.Model:
    """Calls a function that builds a network, and checks its result as `create` does.

    Args:
      target: The value of --model, for messages.
      function: Takes `num_classes` and `image_size`, and returns a Keras model.
      num_classes: See `create`.
      image_size: See `create`.
      builder: See `create`.
      earlier_layers: Number of unnamed layers that the function may use without building them, by
        automatic name; None for none.

    Raises:
      UserError: See `create`.
    """
    model = _call(target, function, num_classes, image_size, builder, earlier_layers or {})
    outputs = getattr(model, "outputs", None) if isinstance(model, keras.Model) else None
    if not outputs:
        raise UserError(
            f"--model={target}: it returned {type(model).__name__}, not a functional or sequential"
            " Keras model."
        )
    _check_input(target, model, image_size)
    _check_output(target, model, num_classes)
    _check_layers(target, model)
    logits = outputs[0]
    if logits.dtype != "float32":
        # An automatic name could equal that of a layer of the model, which counts from zero.
        cast = keras.layers.Activation("linear", dtype="float32", name="float32_logits")
        logits = cast(logits)
    # Some functional models, such as those of keras.applications, take a list of one tensor. A
    # sequential model takes one tensor, and has no `input` before it is called.
    takes_list = not isinstance(model, keras.Sequential) and isinstance(model.input, list)
    if logits is not outputs[0] or takes_list:
        model = keras.Model(model.inputs[0], logits, name=model.name)
    return model


def _import_function(target: str) -> Callable[..., Any]:
    try:
        with private_api.layer_numbers_from({}) as numbers:
            function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"--model={target}: {error}. Pass MODULE:FUNCTION of a module that Python can import."
        ) from None
    except (Exception, SystemExit) as error:
        raise _error_in_module(target, error) from None
    _layers_of_import.setdefault(_module_name(target), dict(numbers))
    return function


def _module_name(target: str) -> str:
    return target.partition(":")[0]


def _call(
    target: str,
    function: Callable[..., Any],
    num_classes: int,
    image_size: int | None,
    builder: Builder,
    earlier_layers: Mapping[str, int],
) -> Any:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(builder.precision)
    keras.utils.set_random_seed(builder.seed % 2**32)
    try:
        # Checkpoints find weights by their path. Layers that were given no name are numbered,
        # so the numbers must not depend on other networks that this process has built before.
        with private_api.layer_numbers_from(earlier_layers):
            return function(num_classes=num_classes, image_size=image_size)
    except TypeError as error:
        raise UserError(
            f"--model={target}: {error}. It is called with num_classes and image_size."
        ) from None
    except (Exception, SystemExit) as error:
        raise _error_in_module(target, error) from None
    finally:
        keras.config.set_dtype_policy(policy)


def _error_in_module(target: str, error: BaseException) -> UserError:
    """Returns a message with type, text and line of an error in the user's module."""
    # Frames of this package and of importlib come first, those of libraries that the module calls
    # last.
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__
    ]
    module = sys.modules.get(_module_name(target))
    file = getattr(module, "__file__", None)
    module_frames = [frame for frame in frames if frame.filename == file] or frames
    where = ""
    # The text of a SyntaxError has the file and the line already.
    if module_frames and not isinstance(error, SyntaxError):
        where = f" in {module_frames[-1].filename}, line {module_frames[-1].lineno}"
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
    expected = (None, image_size, image_size, 3)
    shapes = [tuple(tensor.shape) for tensor in model.inputs]
    if len(shapes) != 1:
        raise UserError(
            f"--model={target}: it has {len(shapes)} inputs, not one. It is called with images of"
            f" shape {expected}."
        )
    shape = shapes[0]
    if len(shape) == len(expected):
        batch, height, width, channels = shape
        fits = [
            size is None or size == expected_size
            for size, expected_size in zip(shape[1:], expected[1:], strict=True)
        ]
        if batch is None and all(fits):
            return
        if batch is None and height == width and channels in (None, 3):
            raise UserError(
                f"--model={target}: its input has shape {shape}, not {expected}. Take the size"
                f" from the argument image_size, or set --image_size={height}."
            )
    raise UserError(
        f"--model={target}: its input has shape {shape}. It is called with images of shape"
        f" {expected}."
    )


def _check_output(target: str, model: keras.Model, num_classes: int) -> None:
    """Raises UserError unless a model has one score per class."""
    if tuple(model.output_shape) != (None, num_classes):
        raise UserError(
            f"--model={target}: its output has shape {model.output_shape}, not (None,"
            f" {num_classes})."
        )


def _check_layers(target: str, model: keras.Model) -> None:
    """Raises UserError for layers that this program would not train as they are meant."""
    if model.losses or any(v.constraint is not None for v in model.trainable_variables):
        raise UserError(
            f"--model={target}: regularizers and constraints are not applied. Use --weight_decay."
        )
    if any(getattr(layer, "synchronized", False) for layer in private_api.flatten_layers(model)):
        raise UserError(
            f"--model={target}: each rank normalizes its own batch. Omit synchronized=True."
        )
    last = _last_operation(model.outputs[0])
    activation_name = getattr(getattr(last, "activation", None), "__name__", "")
    if _PROBABILITY_FUNCTIONS & {type(last).__name__.lower(), activation_name}:
        raise UserError(
            f"--model={target}: the layer {last.name} returns probabilities, not logits. Omit its"
            " activation (classifier_activation=None in keras.applications)."
        )


def _last_operation(output: keras.KerasTensor) -> Any:
    """Returns the operation that computes an output, also if it is in a nested model."""
    operation, index = private_api.producing_operation(output)
    while getattr(operation, "outputs", None):
        operation, index = private_api.producing_operation(operation.outputs[index])
    return operation
