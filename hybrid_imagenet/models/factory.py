"""Builds a network by name: a ResNet, AlexNet with batch normalization, or a function of the
user's.
"""

from __future__ import annotations

from typing import Any

import keras

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import alexnet, resnet, user_model
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
      name: one of `NAMES`, or a function of the user's as MODULE:FUNCTION, which is called with
        `num_classes` and `image_size`; of all that follows, only precision and seed act on it.
      num_classes: number of class scores.
      image_size: side of the square input in pixels; None makes a ResNet that takes any.
      width: channels of a ResNet's first stage; each later one has twice as many.
      stem: of a ResNet, one of `models.depths.STEMS`.
      settings: the attributes of `blocks.Builder`.

    Returns:
      A functional model from [b, image_size, image_size, 3], normalized, in the compute type of
      `precision`, to FP32 logits [b, num_classes].

    Raises:
      UserError: for a name, precision or stem that does not exist, or an image too small for the
        network.
    """
    builder = Builder(**settings)
    if ":" in name:
        return user_model.create(name, num_classes, image_size, builder)
    if name not in NAMES:
        raise UserError(f"--model={name}: choose one of {', '.join(NAMES)}")
    if stem not in STEMS:
        raise UserError(f"--stem={stem}: choose one of {', '.join(STEMS)}")
    if name == "alexnet_bn":
        return alexnet.build(builder, num_classes, image_size)
    return resnet.build(builder, name, num_classes, image_size, width=width, stem=stem)


_APART = 0x9E3779B9  # between the seeds of ranks, which Keras takes modulo 2^31 - 2


def draw_own_numbers(network: keras.Model, rank: int) -> None:
    """Gives each `keras.random.SeedGenerator` of the network, such as dropout's, a seed of this
    rank's own.

    It is called once, after the broadcast of rank 0's state. Rank 0 keeps its seeds, which
    checkpoints hold.
    """
    for state in network.variables:
        if state.name == "seed_generator_state":  # a seed and a counter, int64 [2]
            state.assign_add([rank * _APART, 0])
