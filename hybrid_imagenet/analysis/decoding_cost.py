"""Predicts how many CPU cores a GPU needs to decode its images."""

from __future__ import annotations

import math

IMAGES_PER_CORE_SECOND = 297.0
"""Photographs of ImageNet's size that a core of a GPU host decodes per second, to 224 pixels.

It was measured on a host with an H100. Cores differ: two of an AMD EPYC (Zen 5) decode 1,870
images/s (docs/input.md). `bench input` measures those of a host.
"""
RESIZED_SPEEDUP = 2.2
"""How much faster shards of `data prepare --resize=256` decode (docs/input.md)."""


def cores_needed(images_per_second: float, *, resized: bool = False) -> int:
    """Returns the number of cores that decode as fast as GPUs train.

    Args:
      images_per_second: speed of training, of one GPU or of all GPUs of a host.
      resized: whether the images are shards with a shorter side of 256 pixels.
    """
    rate = IMAGES_PER_CORE_SECOND * (RESIZED_SPEEDUP if resized else 1.0)
    return max(1, math.ceil(images_per_second / rate))
