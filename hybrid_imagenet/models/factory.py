"""Builds a network by name.

It is a ResNet, AlexNet with batch normalization, a network of keras.applications, or the result of
a user's function.
"""

from __future__ import annotations

from typing import Any

import keras

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import alexnet, keras_families, keras_network, resnet, user_model
from hybrid_imagenet.models.blocks import Builder
from hybrid_imagenet.models.depths import DEPTHS, STEMS, WIDTH

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
      name: One of `NAMES`; or keras:NAME for a network of keras.applications, one of
        `keras_families.NAMES`; or a user's function as MODULE:FUNCTION, which is called with
        `num_classes` and `image_size`. Of all other arguments, only `precision` and `seed` affect
        the last two.
      num_classes: Number of class scores.
      image_size: Side of the square input in pixels; None builds a ResNet that accepts any size.
      width: Channels of a ResNet's first stage; each later one has twice as many as the one before.
      stem: Stem of a ResNet, one of `models.depths.STEMS`.
      settings: Attributes of `blocks.Builder`.

    Returns:
      A functional model from [b, image_size, image_size, 3], normalized, in the compute type of
      `precision`, to FP32 logits [b, num_classes].

    Raises:
      UserError: If name, precision or stem does not exist, or the image is too small for the
        network.
    """
    builder = Builder(**settings)
    if keras_families.is_keras_network(name):
        return keras_network.create(name, num_classes, image_size, builder)
    if keras_families.is_user_function(name):
        return user_model.create(name, num_classes, image_size, builder)
    if name not in NAMES:
        raise UserError(f"--model={name} does not exist. Choose one of {', '.join(NAMES)}.")
    if stem not in STEMS:
        raise UserError(f"--stem={stem} does not exist. Choose one of {', '.join(STEMS)}.")
    if name == "alexnet_bn":
        return alexnet.build(builder, num_classes, image_size)
    return resnet.build(builder, name, num_classes, image_size, width=width, stem=stem)
