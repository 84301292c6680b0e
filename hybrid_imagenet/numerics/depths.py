"""Number of blocks in each stage of a residual network (He et al. 2015, table 1)."""

from __future__ import annotations

DEPTHS = {
    "resnet8": (1, 1, 1),
    "resnet10": (1, 1, 1, 1),
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
"""Residual blocks by stage.

resnet10, one basic block per stage, is not in the paper: it is for comparisons on small images. resnet8 is the paper's
smallest network for CIFAR-10 (4.2, n = 1) where its stem is 3x3 and its width 16.
"""
BASIC = ("resnet8", "resnet10", "resnet18", "resnet34")
"""Networks of two 3x3 convolutions per block; the others have 1x1, 3x3, 1x1."""
WIDTH = 64
"""Channels of the first stage; each later stage has twice as many."""
STEMS = ("imagenet", "3x3", "3x3_stride2")
"""7x7 with stride 2 and a pooling, or a 3x3 convolution, also with stride 2."""
