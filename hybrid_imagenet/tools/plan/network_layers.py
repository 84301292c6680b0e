"""Counts parameters and operations of networks by layer: ResNets of He et al. and AlexNet-BN of Jia
et al.
"""

from __future__ import annotations

import dataclasses
import itertools

from hybrid_imagenet.comm.cost_model import Layer
from hybrid_imagenet.models.depths import BASIC, DEPTHS, VERSION_1

MODELS = (*DEPTHS, "alexnet_bn")
_ALEXNET = (
    (11, 96, 4, 2, 3),
    (5, 256, 1, 2, 3),
    (3, 384, 1, 1, 0),
    (3, 384, 1, 1, 0),
    (3, 256, 1, 1, 3),
)
"""Krizhevsky et al. 2012, without groups: kernel, channels, stride, padding, and the pooling
(stride 2) after it.
"""
_HIDDEN = (4096, 4096)


def layers_of(model: str, image_size: int = 224, classes: int = 1000) -> list[Layer]:
    """The layers from input to output; each convolution together with its batch normalization."""
    if model == "alexnet_bn":
        return _alexnet(image_size, classes)
    bottleneck, counts = model not in BASIC, DEPTHS[model]
    side = _half(image_size)
    layers = [_convolution(7, 3, 64, side)]
    side, channels = _half(side), 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            out = width * 4 if bottleneck else width
            shapes = [(3, channels, width), (3, width, width)]
            if bottleneck:
                shapes = [(1, channels, width), (3, width, width), (1, width, out)]
            after = _half(side) if stride == 2 else side
            for kernel, inputs, outputs in shapes:
                before_stride = (
                    bottleneck
                    and model not in VERSION_1
                    and (kernel, inputs) == (1, channels)
                    and outputs == width
                )
                layers.append(
                    _convolution(kernel, inputs, outputs, side if before_stride else after)
                )
            if channels != out or stride == 2:
                layers.append(_convolution(1, channels, out, after))
            side, channels = after, out
    return [*layers, _dense(channels, classes)]


def _alexnet(side: int, classes: int) -> list[Layer]:
    """AlexNet with normalization after each convolution and once more after the last pooling."""
    layers, inputs = [], 3
    for kernel, channels, stride, pad, pool in _ALEXNET:
        side = (side + 2 * pad - kernel) // stride + 1
        layers.append(_convolution(kernel, inputs, channels, side))
        side = (side - pool) // 2 + 1 if pool else side
        inputs = channels
    layers[-1] = dataclasses.replace(layers[-1], parameters=layers[-1].parameters + 2 * inputs)
    return layers + [
        _dense(a, b) for a, b in itertools.pairwise((inputs * side**2, *_HIDDEN, classes))
    ]


def _convolution(kernel: int, inputs: int, outputs: int, side: int) -> Layer:
    weights = kernel * kernel * inputs * outputs
    return Layer(weights + 2 * outputs, weights * side * side)


def _dense(inputs: int, outputs: int) -> Layer:
    return Layer(inputs * outputs + outputs, inputs * outputs)


def _half(side: int) -> int:
    return (side + 1) // 2
