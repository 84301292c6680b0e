"""ResNet and AlexNet with batch normalization, as Keras models."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

import keras
import tensorflow as tf

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
    precision: str = "float32",
    initializer: str = "kaiming",
    zero_last_gamma: bool = True,
    batch_norm: str = "last",
    batch_norm_momentum: float = 0.9,
    batch_norm_epsilon: float = 1e-5,
    seed: int = 0,
    sync_allreduce: Callable[[tf.Tensor, str], tf.Tensor] | None = None,
    width: int = WIDTH,
    stem: str = "imagenet",
    blurpool: bool = False,
    initial_bias: float = 0.0,
    parts: int = 1,
) -> keras.Model:
    """Builds a network that maps images to class scores.

    Args:
      name: one of `NAMES`, or a function of the user's as MODULE:FUNCTION, which is called with `num_classes` and
        `image_size`; the arguments after `precision` do not reach it.
      num_classes: number of class scores.
      image_size: side of the square input in pixels; None makes a ResNet that takes any.
      precision: `float32`, `mixed_float16` or `mixed_bfloat16`. Variables are FP32 in all three.
      initializer: `kaiming`, `xavier` or `gaussian` (see `blocks.convolution_initializer`).
      zero_last_gamma: start the last BN scale of each residual block at 0 (Lu et al. §2.2.3).
      batch_norm: `last`, `moving` or `precise` (see `normalization.BatchNormalization`).
      batch_norm_momentum: decay of the moving average.
      batch_norm_epsilon: added to the variance.
      seed: seed of the initial weights; each layer draws from its own stream, derived from (seed, layer name).
      sync_allreduce: `(tensor, name) -> sum over ranks`; given, training statistics cover the batches of all ranks.
      width: channels of a ResNet's first stage; each later one has twice as many.
      stem: of a ResNet, one of `numerics.depths.STEMS`.
      blurpool: blur before strides (see `layers.BlurPool`); ResNets only.
      initial_bias: score of every class at the start, before the weights of the classifier act.
      parts: equal parts of a training batch that are normalized each by itself.

    Returns:
      A functional model from [b, image_size, image_size, 3], normalized, in the compute type of `precision`, to
      FP32 logits [b, num_classes].

    Raises:
      UserError: for a name, precision or stem that does not exist, or an image too small for the network.
    """
    if ":" in name:
        return _of_user(name, num_classes, image_size, precision)
    if name not in NAMES:
        raise UserError(f"--model={name}: choose one of {', '.join(NAMES)}")
    if stem not in STEMS:
        raise UserError(f"--stem={stem}: choose one of {', '.join(STEMS)}")
    builder = Builder(
        precision=precision,
        initializer=initializer,
        zero_last_gamma=zero_last_gamma,
        batch_norm=batch_norm,
        batch_norm_momentum=batch_norm_momentum,
        batch_norm_epsilon=batch_norm_epsilon,
        seed=seed,
        sync_allreduce=sync_allreduce,
        parts=parts,
        blurpool=blurpool,
        initial_bias=initial_bias,
    )
    if name == "alexnet_bn":
        return alexnet.build(builder, num_classes, image_size)
    return resnet.build(builder, name, num_classes, image_size, width=width, stem=stem)


def _of_user(target: str, num_classes: int, image_size: int | None, precision: str) -> keras.Model:
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
    if model.losses or any(v.constraint is not None for v in model.trainable_variables):
        raise UserError(f"--model={target}: regularizers and constraints are not applied; use --weight_decay")
    if outputs[0].dtype != "float32":
        model = keras.Model(model.inputs, keras.layers.Activation("linear", dtype="float32")(outputs[0]))
    return model
