"""Counts parameters and operations of networks by layer (residual ones after He et al., with the stride in the 3x3)."""

from __future__ import annotations

from hybrid_imagenet.analysis.step_time import Layer
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.depths import BASIC, DEPTHS
from hybrid_imagenet.tools.plan import plain_networks

_PLAIN = {"alexnet_bn": plain_networks.alexnet_bn, "vgg16": plain_networks.vgg16}
MODELS = (*DEPTHS, *_PLAIN)


def layers_of(model: str, image_size: int = 224, classes: int = 1000) -> list[Layer]:
    """The layers from input to output; each convolution together with its batch normalization.

    Raises:
      UserError: for an unknown model.
    """
    if model in _PLAIN:
        return _PLAIN[model](image_size, classes)
    if model not in DEPTHS:
        raise UserError(f"--model={model}: choose one of {', '.join(MODELS)}")
    bottleneck, counts = model not in BASIC, DEPTHS[model]
    side = _half(image_size)
    layers = [_convolution(7, 3, 64, side)]
    side, channels = _half(side), 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            out = width * 4 if bottleneck else width
            shapes = _bottleneck(channels, width) if bottleneck else [(3, channels, width), (3, width, width)]
            after = _half(side) if stride == 2 else side
            for kernel, inputs, outputs in shapes:
                before_stride = bottleneck and (kernel, inputs) == (1, channels) and outputs == width
                layers.append(_convolution(kernel, inputs, outputs, side if before_stride else after))
            if channels != out or stride == 2:
                layers.append(_convolution(1, channels, out, after))
            side, channels = after, out
    return [*layers, Layer(channels * classes + classes, channels * classes, matrix=(channels, classes))]


def _bottleneck(channels: int, width: int) -> list[tuple[int, int, int]]:
    return [(1, channels, width), (3, width, width), (1, width, 4 * width)]


def _convolution(kernel: int, inputs: int, outputs: int, side: int) -> Layer:
    weights = kernel * kernel * inputs * outputs
    return Layer(weights + 2 * outputs, weights * side * side, 1, (weights // outputs, outputs))


def _half(side: int) -> int:
    return (side + 1) // 2
