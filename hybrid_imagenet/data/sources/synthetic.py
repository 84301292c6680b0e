"""Generates images, to measure everything else without a dataset.

The images are JPEGs to decode, or pixels that are decoded only once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import images
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.schedules import mlperf

IMAGENET_SIZES = {"train": mlperf.TRAIN_IMAGES, "validation": 50_000}
_IMAGENET_CLASSES = 1000
_NUM_DISTINCT_IMAGES = 64
# The most common size in ImageNet.
_HEIGHT = 375
_WIDTH = 500
# With this much noise and this quality, JPEGs are as large as the average one of ImageNet.
_NOISE = 30
_JPEG_QUALITY = 87


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Returns the number of classes; there are no files to look for."""
    return SplitSummary("generated", request.num_classes)


def open_split(request: DatasetRequest) -> Source:
    """Generates JPEGs, which are decoded only once with `synthetic_tensors`."""
    return SyntheticSource(
        request.split,
        request.num_examples,
        request.num_classes,
        reuse_decoded_batch=request.name == "synthetic_tensors",
    )


class SyntheticSource(Source):
    """Holds 64 distinct JPEGs in memory and repeats them.

    Each has 500 x 375 pixels and about 110 kB.

    Args:
      split: "train" or "validation".
      num_examples: Number of training images (default: ImageNet's). The validation split is in
        proportion.
      num_classes: Number of classes (default: 1000).
      reuse_decoded_batch: See `Source`.
    """

    def __init__(
        self,
        split: str,
        num_examples: int | None,
        num_classes: int | None,
        *,
        reuse_decoded_batch: bool,
    ) -> None:
        super().__init__()
        sizes = IMAGENET_SIZES
        if num_examples is not None:
            num_validation = max(1, num_examples * sizes["validation"] // sizes["train"])
            sizes = {"train": num_examples, "validation": num_validation}
        self.num_examples = sizes[split]
        self.num_classes = num_classes or _IMAGENET_CLASSES
        self.class_names = tuple(str(number) for number in range(self.num_classes))
        self.reuse_decoded_batch = reuse_decoded_batch
        num_images = min(_NUM_DISTINCT_IMAGES, self.num_examples)
        self._images = [_generate_photograph(seed) for seed in range(num_images)]

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns one of the JPEGs; labels repeat in order."""
        return self._images[index % len(self._images)], index % self.num_classes

    def stored_labels(self) -> npt.NDArray[np.int64]:
        return np.arange(self.num_examples, dtype=np.int64) % self.num_classes

    def locate(self, index: int) -> tuple[str, int]:
        """Returns "synthetic" and the index, because there is no file."""
        return "synthetic", index


def _generate_photograph(seed: int) -> bytes:
    """Returns a JPEG of smooth shapes with noise."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    colors = generator.integers(0, 256, (6, 8, 3), np.uint8)
    shapes = Image.fromarray(colors).resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)
    noise = generator.normal(0, _NOISE, (_HEIGHT, _WIDTH, 3))
    pixels = np.clip(np.asarray(shapes) + noise, 0, 255).astype(np.uint8)
    return images.encode(Image.fromarray(pixels), "JPEG", quality=_JPEG_QUALITY)
