"""Makes up images, to measure the rest without a data set: JPEGs to decode, or tensors that are
ready.
"""

from __future__ import annotations

import numpy as np

from hybrid_imagenet.data import images
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.schedules import mlperf

IMAGENET_SIZES = {"train": mlperf.TRAIN_IMAGES, "validation": 50_000}
_DISTINCT = 64
_HEIGHT, _WIDTH = 375, 500  # the most common size in ImageNet


def find(request: DatasetRequest) -> SplitSummary:
    """Has nothing to look for."""
    return SplitSummary("generated", request.num_classes)


def open_split(request: DatasetRequest) -> Source:
    """Makes a split: JPEGs, or with `synthetic_tensors` pixels that are decoded once."""
    ready = request.name == "synthetic_tensors"
    return SyntheticSource(request.split, request.num_examples, request.num_classes, ready=ready)


class SyntheticSource(Source):
    """Holds images in memory: 64 distinct JPEGs of 500x375 pixels and about 110 kB, used again and
    again.
    """

    def __init__(
        self, split: str, num_examples: int | None, num_classes: int | None, *, ready: bool
    ) -> None:
        """Makes the images; `num_examples` is the size of the training split (default:
        ImageNet's).
        """
        super().__init__()
        sizes = IMAGENET_SIZES
        if num_examples is not None:
            held_out = max(1, num_examples * sizes["validation"] // sizes["train"])
            sizes = {"train": num_examples, "validation": held_out}
        self.num_examples = sizes[split]
        self.num_classes = num_classes or 1000
        self.class_names = tuple(str(number) for number in range(self.num_classes))
        self.ready = ready
        self._images = [_photograph(seed) for seed in range(min(_DISTINCT, self.num_examples))]

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns one of the JPEGs; labels go round."""
        return self._images[index % len(self._images)], index % self.num_classes

    def locate(self, index: int) -> tuple[str, int]:
        """Names the example: synthetic images lie in no file."""
        return "synthetic", index


def _photograph(seed: int) -> bytes:
    from PIL import Image

    generator = np.random.default_rng(seed)
    smooth = generator.integers(0, 256, (6, 8, 3), np.uint8)
    shapes = Image.fromarray(smooth).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
    noise = generator.normal(0, 30, (_HEIGHT, _WIDTH, 3))
    pixels = np.clip(np.asarray(shapes) + noise, 0, 255).astype(np.uint8)
    return images.encoded(Image.fromarray(pixels), "JPEG", quality=87)
