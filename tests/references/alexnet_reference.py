"""Oracle for AlexNet with batch normalization: the forward pass in NumPy float64.

Reference: Krizhevsky et al. 2012, 3.5, and Jia et al., 3.2. The network has five convolutions
without groups: 96 channels of 11 x 11 with stride 4, 256 of 5 x 5, and 384, 384 and 256 of 3 x 3,
with padding that keeps the size. Batch normalization replaces local response normalization after
each convolution, and there is one more after pool5. Pools are 3 x 3 with stride 2, after the first,
second and fifth convolution. There are two hidden layers of 4096. Kernels are [k, k, in, out].
Normalizations are (scale, offset, mean, variance).
"""

import numpy as np

from tests.references.resnet_reference import convolve, max_pool

# Size, output channels, stride and padding of each convolution.
CONVOLUTIONS = (
    (11, 96, 4, 2),
    (5, 256, 1, 2),
    (3, 384, 1, 1),
    (3, 384, 1, 1),
    (3, 256, 1, 1),
)
POOLED = (0, 1, 4)
HIDDEN = (4096, 4096)


def normalize(x, scale, offset, mean, variance, epsilon=1e-5):
    return (x - mean) / np.sqrt(variance + epsilon) * scale + offset


def logits(x, kernels, norms, last_norm, dense):
    """Returns class scores of images [b, h, w, 3] at inference, where dropout does nothing.

    Args:
      x: Normalized images.
      kernels: Kernels of the five convolutions, which have no bias.
      norms: The five normalizations after them.
      last_norm: The normalization after pool5.
      dense: (kernel, bias) of the two hidden layers and the classifier.
    """
    for index, ((_, _, stride, pad), kernel, norm) in enumerate(
        zip(CONVOLUTIONS, kernels, norms, strict=True)
    ):
        x = np.maximum(normalize(convolve(x, kernel, stride, pad), *norm), 0)
        if index in POOLED:
            x = max_pool(x, 3, 2, 0)
    x = normalize(x, *last_norm).reshape(len(x), -1)
    for kernel, bias in dense[:-1]:
        x = np.maximum(x @ kernel + bias, 0)
    kernel, bias = dense[-1]
    return x @ kernel + bias


def shapes(classes=1000, side=224):
    """Returns the shapes of all trainable parameters, from input to output.

    A convolution has kernel, scale and offset; a dense layer has kernel and bias.
    """
    parameters = []
    inputs = 3
    for index, (size, outputs, stride, pad) in enumerate(CONVOLUTIONS):
        parameters += [(size, size, inputs, outputs), (outputs,), (outputs,)]
        side = (side + 2 * pad - size) // stride + 1
        if index in POOLED:
            side = (side - 3) // 2 + 1
        inputs = outputs
    parameters += [(inputs,), (inputs,)]
    inputs *= side * side
    for outputs in (*HIDDEN, classes):
        parameters += [(inputs, outputs), (outputs,)]
        inputs = outputs
    return parameters
