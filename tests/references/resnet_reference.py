"""Oracle for ResNet v1 and v1.5: the forward pass in NumPy float64.

Reference: He et al. 2015 (table 1, fig. 5) and Goyal et al. (5.1). Weights are in the order in
which the network is described: the stem; for each block its projection (if it has one) and its
convolutions, each followed by the scale, offset, inference mean and variance of its normalization;
and last the kernel and bias of the classifier. Kernels are [k, k, in, out].
"""

import numpy as np

BLOCKS = {
    "resnet8": (2, (1, 1, 1)),
    "resnet10": (2, (1, 1, 1, 1)),
    "resnet18": (2, (2, 2, 2, 2)),
    "resnet34": (2, (3, 4, 6, 3)),
    "resnet50": (3, (3, 4, 6, 3)),
    "resnet101": (3, (3, 4, 23, 3)),
    "resnet152": (3, (3, 8, 36, 3)),
    "resnet50_v1": (3, (3, 4, 6, 3)),
}


def convolve(x, kernel, stride, pad):
    """Cross-correlates [b, h, w, in] with a kernel, with zeros around the image."""
    size = kernel.shape[0]
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))[
        :, ::stride, ::stride
    ]
    return np.einsum("bhwcij,ijco->bhwo", windows, kernel, optimize=True)


def max_pool(x, size, stride, pad):
    """Takes the maximum over windows of [b, h, w, c], with minus infinity around the image."""
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))[
        :, ::stride, ::stride
    ]
    return windows.max(axis=(-2, -1))


class Network:
    """Applies the layers.

    `convolutions` is an iterator over (kernel, scale, offset, mean, variance).
    """

    def __init__(self, convolutions, epsilon, training):
        self.convolutions = iter(convolutions)
        self.epsilon = epsilon
        self.training = training

    def unit(self, x, stride):
        """Applies a convolution (padded by half its kernel) and normalization."""
        kernel, scale, offset, mean, variance = next(self.convolutions)
        x = convolve(x, kernel, stride, kernel.shape[0] // 2)
        if self.training:
            mean = x.mean(axis=(0, 1, 2))
            variance = x.var(axis=(0, 1, 2))
        return (x - mean) / np.sqrt(variance + self.epsilon) * scale + offset

    def block(self, x, convolutions, stride, projected, strided):
        """Applies a residual block; `strided` is the index of the convolution with the stride."""
        shortcut = self.unit(x, stride) if projected else x
        for index in range(convolutions):
            x = self.unit(x, stride if index == strided else 1)
            if index < convolutions - 1:
                x = np.maximum(x, 0)
        return np.maximum(x + shortcut, 0)


def logits(name, x, convolutions, classifier, *, stem="imagenet", epsilon=1e-5, training=False):
    """Returns class scores of normalized images [b, h, w, 3].

    In training mode the statistics of the batch are used.
    """
    per_block, counts = BLOCKS[name]
    network = Network(convolutions, epsilon, training)
    x = np.maximum(network.unit(x, 1 if stem == "3x3" else 2), 0)
    if stem == "imagenet":
        x = max_pool(x, 3, 2, 1)
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            projected = index == 0 and (per_block == 3 or stage > 0)
            # v1 (He et al. 2015) has the stride in the first 1x1 convolution, and v1.5 (Goyal et
            # al., 5.1) in the 3x3 convolution.
            strided = 0 if per_block == 2 or name.endswith("_v1") else 1
            x = network.block(x, per_block, stride, projected, strided)
    kernel, bias = classifier
    return x.mean(axis=(1, 2)) @ kernel + bias


def parameter_count(name, classes, first=64, kernel=7):
    """Counts trainable parameters from table 1 of He et al. 2015.

    The stem has `first` channels and a kernel of `kernel` pixels.
    """
    per_block, counts = BLOCKS[name]
    total = kernel * kernel * 3 * first + 2 * first
    inputs = first
    for stage, count in enumerate(counts):
        width = first * 2**stage
        outputs = width if per_block == 2 else 4 * width
        for index in range(count):
            if index == 0 and (per_block == 3 or stage > 0):
                total += inputs * outputs + 2 * outputs
            if per_block == 2:
                total += 9 * inputs * width + 9 * width * width + 4 * width
            else:
                total += (
                    inputs * width + 9 * width * width + width * outputs + 4 * width + 2 * outputs
                )
            inputs = outputs
    return total + inputs * classes + classes
