"""Builds AlexNet with batch normalization, as Jia et al. train it."""

from __future__ import annotations

import keras

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.blocks import Builder, convolution_initializer, layer_seed

# Smaller images would leave pool5 without output.
_MIN_IMAGE_SIZE = 63
_DROPOUT_RATE = 0.5
_HIDDEN_UNITS = 4096


def build(builder: Builder, num_classes: int, image_size: int | None) -> keras.Model:
    """Builds AlexNet-BN, from [b, image_size, image_size, 3] to logits [b, num_classes].

    It has the five convolutions of Krizhevsky et al. (2012) without groups. Batch normalization
    replaces local response normalization after each of them, and follows pool5 too (Jia et al.).
    Jia et al. print no table of layers, so the widths are those of the original.

    Raises:
      UserError: If the image is too small for the three poolings.
    """
    if image_size is None or image_size < _MIN_IMAGE_SIZE:
        raise UserError(
            f"--image_size={image_size} is too small for --model=alexnet_bn. Set"
            f" {_MIN_IMAGE_SIZE} pixels or more."
        )
    image = builder.images(image_size)
    x = builder.conv_norm_relu(image, 96, 11, stride=4, pad=2, name="stage1")
    x = _pool(builder, x, "pool1")
    x = builder.conv_norm_relu(x, 256, 5, name="stage2")
    x = _pool(builder, x, "pool2")
    x = builder.conv_norm_relu(x, 384, 3, name="stage3")
    x = builder.conv_norm_relu(x, 384, 3, name="stage4")
    x = builder.conv_norm_relu(x, 256, 3, name="stage5")
    x = builder.norm(_pool(builder, x, "pool5"), name="pool5_bn")
    x = keras.layers.Flatten(dtype=builder.precision, name="flatten")(x)
    for name in ("hidden6", "hidden7"):
        x = _hidden(builder, x, name)
    return keras.Model(image, builder.logits(x, num_classes), name="alexnet_bn")


def _pool(builder: Builder, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    return keras.layers.MaxPooling2D(3, 2, dtype=builder.precision, name=name)(x)


def _hidden(builder: Builder, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    x = keras.layers.Dense(
        _HIDDEN_UNITS,
        activation="relu",
        kernel_initializer=convolution_initializer(builder.initializer, builder.seed, name),
        dtype=builder.precision,
        name=name,
    )(x)
    seed = layer_seed(builder.seed, f"{name}_dropout")
    return keras.layers.Dropout(
        _DROPOUT_RATE, seed=seed, dtype=builder.precision, name=f"{name}_dropout"
    )(x)
