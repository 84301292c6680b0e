"""Lists the residual networks and the number of blocks in each of their stages.

Reference:
  He et al. 2015, table 1.
"""

from __future__ import annotations

DEPTHS = {
    "resnet8": (1, 1, 1),
    "resnet10": (1, 1, 1, 1),
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
    "resnet50_v1": (3, 4, 6, 3),
}
"""Residual blocks by stage.

resnet10, with one basic block per stage, is not in the paper. It is for comparisons on small
images. With a 3x3 stem and a width of 16, resnet8 is the paper's smallest network for CIFAR-10
(section 4.2, n = 1).
"""
BASIC = ("resnet8", "resnet10", "resnet18", "resnet34")
"""Networks whose blocks are two 3x3 convolutions; those of the others are 1x1, 3x3, 1x1."""
VERSION_1 = "resnet50_v1"
"""The network with the stride of a block in its first 1x1 convolution, as He et al. 2015 print it.

The other bottleneck networks are v1.5, with the stride in the 3x3 convolution (Goyal et al. §5.1).
Both have the same parameters. v1.5 needs 4.1 instead of 3.9 billion multiply-adds at 224 pixels and
is about half a point more accurate.
"""
WIDTH = 64
"""Channels of the first stage; each later stage has twice as many as the one before."""
STEMS = ("imagenet", "3x3", "3x3_stride2")
"""7x7 with stride 2 and a pooling; a 3x3 convolution; a 3x3 convolution with stride 2."""
TORCHVISION_NETWORKS = tuple(
    name for name in DEPTHS if name not in ("resnet8", "resnet10", VERSION_1)
)
"""ResNets available in torchvision. Its bottleneck networks are v1.5."""
TORCHVISION_EPSILON = 1e-5
"""The number that torchvision's normalizations add to variances."""
