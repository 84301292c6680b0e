"""Builds ResNets of 8 to 152 layers (He et al. 2015).

Bottleneck blocks are v1.5, with the stride in the 3x3 convolution as in Goyal et al. §5.1. The
network `models.depths.VERSION_1` has it in the first 1x1 convolution, as He et al. print it.
Depths, widths and stems, also those for small images, are in `models.depths`.
"""

from __future__ import annotations

import keras

from hybrid_imagenet.models.blocks import Builder
from hybrid_imagenet.models.depths import BASIC, DEPTHS, VERSION_1, WIDTH
from hybrid_imagenet.models.layers import BlurPool, MaxPool2D

# The last convolution of a bottleneck block has this many times the channels of the others.
_EXPANSION = 4


def build(
    builder: Builder,
    name: str,
    num_classes: int,
    image_size: int | None,
    *,
    width: int = WIDTH,
    stem: str = "imagenet",
) -> keras.Model:
    """Builds a network from [b, image_size, image_size, 3] to logits [b, num_classes].

    Args:
      builder: Adds the layers.
      name: A key of `models.depths.DEPTHS`.
      num_classes: Number of logits.
      image_size: Side of the input in pixels; None accepts any.
      width: Channels of the first stage; each later stage has twice as many as the one before.
      stem: `imagenet` for 7x7 with stride 2 and a pooling; `3x3` and `3x3_stride2` for a 3x3
        convolution, for small images (He et al. 2015, 4.2).
    """
    block = _bottleneck
    if name in BASIC:
        block = _basic
    elif name == VERSION_1:
        block = _bottleneck_v1
    image = builder.images(image_size)
    x = _stem(builder, image, width, stem)
    for stage, count in enumerate(DEPTHS[name], start=1):
        for index in range(count):
            stride = 2 if index == 0 and stage > 1 else 1
            stage_width = width * 2 ** (stage - 1)
            x = block(builder, x, stage_width, stride, f"stage{stage}_block{index + 1}")
    # The mean over pixels is taken in FP32, like all sums over many values.
    x = keras.layers.GlobalAveragePooling2D(dtype="float32", name="pool")(x)
    return keras.Model(image, builder.logits(x, num_classes), name=name)


def _stem(builder: Builder, image: keras.KerasTensor, width: int, stem: str) -> keras.KerasTensor:
    if stem != "imagenet":
        stride = 2 if stem == "3x3_stride2" else 1
        return builder.conv_norm_relu(image, width, 3, stride=stride, name="stem")
    if builder.fuses_stem:
        x = builder.conv(image, width, 7, stride=2, name="stem_conv")
        return builder.norm_relu_pool(x, name="stem_bn")
    x = builder.conv_norm_relu(image, width, 7, stride=2, name="stem")
    # With `blurpool` the blur takes over the stride of the pooling.
    pool_stride = 1 if builder.blurpool else 2
    x = MaxPool2D(3, pool_stride, pad=1, dtype=builder.precision, name="stem_pool")(x)
    if builder.blurpool:
        x = BlurPool(2, dtype=builder.precision, name="stem_pool_blur")(x)
    return x


def _bottleneck_v1(
    builder: Builder, x: keras.KerasTensor, width: int, stride: int, name: str
) -> keras.KerasTensor:
    """Adds 1x1 down with the stride, 3x3, 1x1 up to four times the width, plus the shortcut."""
    shortcut = _shortcut(builder, x, _EXPANSION * width, stride, name)
    y = builder.conv_norm_relu(x, width, 1, stride=stride, name=f"{name}_1")
    y = builder.conv_norm_relu(y, width, 3, name=f"{name}_2")
    y = builder.conv(y, _EXPANSION * width, 1, name=f"{name}_3_conv")
    return builder.join(y, shortcut, name=name, norm_name=f"{name}_3_bn")


def _bottleneck(
    builder: Builder, x: keras.KerasTensor, width: int, stride: int, name: str
) -> keras.KerasTensor:
    """Adds 1x1 down, 3x3 with the stride, 1x1 up to four times the width, plus the shortcut."""
    y = builder.conv_norm_relu(x, width, 1, name=f"{name}_1")
    shortcut = _shortcut(builder, x, _EXPANSION * width, stride, name)
    y = builder.conv_norm_relu(y, width, 3, stride=stride, name=f"{name}_2")
    y = builder.conv(y, _EXPANSION * width, 1, name=f"{name}_3_conv")
    return builder.join(y, shortcut, name=name, norm_name=f"{name}_3_bn")


def _basic(
    builder: Builder, x: keras.KerasTensor, width: int, stride: int, name: str
) -> keras.KerasTensor:
    """Adds 3x3 with the stride, 3x3, plus the shortcut."""
    shortcut = _shortcut(builder, x, width, stride, name)
    y = builder.conv_norm_relu(x, width, 3, stride=stride, name=f"{name}_1")
    y = builder.conv(y, width, 3, name=f"{name}_2_conv")
    return builder.join(y, shortcut, name=name, norm_name=f"{name}_2_bn")


def _shortcut(
    builder: Builder, x: keras.KerasTensor, filters: int, stride: int, name: str
) -> keras.KerasTensor:
    """Returns the identity, or a 1x1 projection if the shape changes."""
    if stride == 1 and x.shape[-1] == filters:
        return x
    x = builder.conv(x, filters, 1, stride=stride, name=f"{name}_shortcut_conv")
    return builder.norm(x, name=f"{name}_shortcut_bn")
