"""Counts parameters and operations per layer.

For the ResNets of He et al. and AlexNet-BN of Jia et al.
"""

from __future__ import annotations

import dataclasses
import itertools

from hybrid_imagenet.models.depths import BASIC, DEPTHS, VERSION_1
from hybrid_imagenet.planner.cost_model import Layer

MODELS = (*DEPTHS, "alexnet_bn")


@dataclasses.dataclass(frozen=True)
class _AlexNetConvolution:
    """A convolution of AlexNet.

    Attributes:
      kernel: Side of the kernel in pixels.
      channels: Output channels.
      stride: Stride in both directions.
      padding: Pixels added on each side.
      pool: Side of the max-pooling with stride 2 that follows; 0 if there is none.
    """

    kernel: int
    channels: int
    stride: int
    padding: int
    pool: int


# Krizhevsky et al. 2012, without groups.
_ALEXNET_CONVOLUTIONS = (
    _AlexNetConvolution(kernel=11, channels=96, stride=4, padding=2, pool=3),
    _AlexNetConvolution(kernel=5, channels=256, stride=1, padding=2, pool=3),
    _AlexNetConvolution(kernel=3, channels=384, stride=1, padding=1, pool=0),
    _AlexNetConvolution(kernel=3, channels=384, stride=1, padding=1, pool=0),
    _AlexNetConvolution(kernel=3, channels=256, stride=1, padding=1, pool=3),
)
_ALEXNET_HIDDEN_UNITS = (4096, 4096)


def layers_of(model: str, image_size: int = 224, classes: int = 1000) -> list[Layer]:
    """Returns the layers of a network from input to output.

    A convolution and the batch normalization after it are one layer.

    Args:
      model: One of `MODELS`.
      image_size: Side of an image in pixels.
      classes: Units of the last layer.
    """
    if model == "alexnet_bn":
        return _alexnet_layers(image_size, classes)
    return _resnet_layers(model, image_size, classes)


def _resnet_layers(model: str, image_size: int, classes: int) -> list[Layer]:
    """Returns the layers of a ResNet (He et al. 2015, table 1)."""
    side = _halve(image_size)
    layers = [_convolution(kernel=7, inputs=3, outputs=64, output_side=side)]
    side = _halve(side)  # the max-pooling of the stem
    channels = 64
    for stage, blocks in enumerate(DEPTHS[model]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers += _block_layers(model, channels, 64 * 2**stage, side, stride)
            channels = _block_outputs(model, 64 * 2**stage)
            if stride == 2:
                side = _halve(side)
    return [*layers, _dense(channels, classes)]


def _block_outputs(model: str, width: int) -> int:
    """Returns the output channels of a block with 3x3 convolutions of `width`."""
    return width if model in BASIC else width * 4


def _block_layers(model: str, inputs: int, width: int, side: int, stride: int) -> list[Layer]:
    """Returns the convolutions of a residual block, then its projection, if any.

    Args:
      model: Name of the ResNet.
      inputs: Channels that enter the block.
      width: Channels of its 3x3 convolutions.
      side: Side in pixels of the images that enter the block.
      stride: 1 or 2.
    """
    outputs = _block_outputs(model, width)
    output_side = _halve(side) if stride == 2 else side
    if model in BASIC:
        layers = [
            _convolution(3, inputs, width, output_side),
            _convolution(3, width, width, output_side),
        ]
    else:
        # The stride is in the first 1x1 convolution in version 1, and in the 3x3 convolution after
        # it in the other networks. There, the first convolution still sees the larger images.
        first_side = output_side if model == VERSION_1 else side
        layers = [
            _convolution(1, inputs, width, first_side),
            _convolution(3, width, width, output_side),
            _convolution(1, width, outputs, output_side),
        ]
    if inputs != outputs or stride == 2:
        layers.append(_convolution(1, inputs, outputs, output_side))
    return layers


def _alexnet_layers(image_size: int, classes: int) -> list[Layer]:
    """Returns the layers of AlexNet with batch normalization.

    It follows each convolution, and once more the last pooling.
    """
    layers = []
    side = image_size
    channels = 3
    for convolution in _ALEXNET_CONVOLUTIONS:
        side = (side + 2 * convolution.padding - convolution.kernel) // convolution.stride + 1
        layers.append(_convolution(convolution.kernel, channels, convolution.channels, side))
        channels = convolution.channels
        if convolution.pool:
            side = (side - convolution.pool) // 2 + 1
    # Scale and offset of the normalization after the last pooling.
    layers[-1] = dataclasses.replace(layers[-1], parameters=layers[-1].parameters + 2 * channels)
    units = (channels * side**2, *_ALEXNET_HIDDEN_UNITS, classes)
    return layers + [_dense(inputs, outputs) for inputs, outputs in itertools.pairwise(units)]


def _convolution(kernel: int, inputs: int, outputs: int, output_side: int) -> Layer:
    """Returns a convolution without bias, together with its batch normalization."""
    weights = kernel * kernel * inputs * outputs
    return Layer(weights + 2 * outputs, weights * output_side * output_side)


def _dense(inputs: int, outputs: int) -> Layer:
    return Layer(inputs * outputs + outputs, inputs * outputs)


def _halve(side: int) -> int:
    return (side + 1) // 2
