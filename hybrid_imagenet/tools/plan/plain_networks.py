"""Counts parameters and operations of networks without shortcuts, layer by layer: AlexNet-BN and VGG-16."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hybrid_imagenet.analysis.step_time import Layer


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution with an odd or even kernel and what follows it.

    Attributes:
      kernel: its side.
      channels: of the output.
      stride: its stride.
      pad: zeros on each side.
      pool: side of the pooling window after it, of stride 2; 0 for none.
    """

    kernel: int
    channels: int
    stride: int = 1
    pad: int = 1
    pool: int = 0


ALEXNET = (
    Convolution(11, 96, 4, 2, pool=3),
    Convolution(5, 256, pad=2, pool=3),
    Convolution(3, 384),
    Convolution(3, 384),
    Convolution(3, 256, pool=3),
)
"""Krizhevsky et al. 2012, without groups."""
VGG16 = tuple(
    Convolution(3, channels, pool=2 if last else 0)
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
    for last in (number == count - 1 for number in range(count))
)
"""Simonyan, Zisserman, arXiv 1409.1556, configuration D."""
_HIDDEN = (4096, 4096)


def alexnet_bn(image_size: int, classes: int) -> list[Layer]:
    """AlexNet with normalization after each convolution and once more after pool5 (Jia et al.)."""
    layers, values = _convolutions(ALEXNET, image_size, normalized=True)
    last = layers[-1]
    extra = 2 * ALEXNET[-1].channels
    layers[-1] = dataclasses.replace(last, parameters=last.parameters + extra, normalizations=last.normalizations + 1)
    return layers + _dense(values, classes)


def vgg16(image_size: int, classes: int) -> list[Layer]:
    """VGG-16, without normalization."""
    layers, values = _convolutions(VGG16, image_size, normalized=False)
    return layers + _dense(values, classes)


def _convolutions(table: Sequence[Convolution], side: int, *, normalized: bool) -> tuple[list[Layer], int]:
    """The layers, and how many values the last one hands on."""
    layers, inputs = [], 3
    for c in table:
        side = (side + 2 * c.pad - c.kernel) // c.stride + 1
        weights = c.kernel**2 * inputs * c.channels
        # Normalization has a scale and an offset, and without it the convolution has a bias.
        parameters = weights + (2 if normalized else 1) * c.channels
        layers.append(Layer(parameters, weights * side * side, int(normalized), (weights // c.channels, c.channels)))
        side = (side - c.pool) // 2 + 1 if c.pool else side
        inputs = c.channels
    return layers, inputs * side * side


def _dense(inputs: int, classes: int) -> list[Layer]:
    widths = (inputs, *_HIDDEN, classes)
    return [Layer(a * b + b, a * b, matrix=(a, b)) for a, b in itertools.pairwise(widths)]
