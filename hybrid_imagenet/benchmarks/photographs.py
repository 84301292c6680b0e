"""Generates photographs for benchmarks from the two sample photographs of scikit-learn.

There are 1,000 JPEGs of 500x375 pixels and about 110 kB.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.commands.data import prepare
from hybrid_imagenet.data import datasets, images
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.errors import import_optional

_CACHE_NAME = "benchmark-photographs-1"
_NUM_TRAINING_IMAGES = 1000
_NUM_VALIDATION_IMAGES = 10
_NUM_CLASSES = 10
_WIDTH = 500
_HEIGHT = 375
# Size of scikit-learn's photographs.
_ORIGINAL_WIDTH = 640
_ORIGINAL_HEIGHT = 427


def photograph_shards(resize: int | None) -> Path:
    """Returns the directory of TFRecord shards of the photographs, which are created once.

    Args:
      resize: Shorter side of the images in pixels; None keeps their size.
    """
    photographs = photograph_folder()
    directory = photographs.with_name(f"{photographs.name}-shards-{resize or 'full'}")
    if not (directory / tfrecord.MANIFEST).is_file():
        settings = prepare.PrepareSettings(resize=resize, per_shard=128)
        prepare.prepare_dataset(
            datasets.DatasetRequest("folder", str(photographs)),
            directory,
            settings,
            os.cpu_count() or 1,
        )
    return directory


def photograph_folder() -> Path:
    """Returns a folder dataset of 1,000 JPEGs in the user's cache, which is created once.

    They are different crops of two photographs, with noise.
    """
    directory = files.cache_root() / _CACHE_NAME
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        dataset = Path(temporary) / "dataset"
        counts = {"train": _NUM_TRAINING_IMAGES, "validation": _NUM_VALIDATION_IMAGES}
        for split, count in counts.items():
            for number, content in enumerate(_generate_photographs(count)):
                label = number % _NUM_CLASSES
                path = dataset / split / f"class{label}" / f"{number:04d}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        dataset.rename(directory)
    return directory


def _generate_photographs(count: int) -> Iterator[bytes]:
    """Yields the contents of JPEG files."""
    from PIL import Image

    sklearn_datasets = import_optional(
        "sklearn.datasets",
        "The benchmark makes its photographs from those of scikit-learn, which is missing. Install"
        " it with: pip install scikit-learn",
    )
    originals = [Image.fromarray(image) for image in sklearn_datasets.load_sample_images().images]
    generator = np.random.default_rng(0)
    for number in range(count):
        scale = generator.uniform(0.6, 1.1)
        width = int(_WIDTH * scale)
        height = int(_HEIGHT * scale)
        x = int(generator.integers(0, _ORIGINAL_WIDTH - width + 1))
        y = int(generator.integers(0, _ORIGINAL_HEIGHT - height + 1))
        crop = originals[number % 2].resize(
            (_WIDTH, _HEIGHT), Image.Resampling.BICUBIC, (x, y, x + width, y + height)
        )
        noise = generator.normal(0, 11, (_HEIGHT, _WIDTH, 3))
        pixels = np.clip(np.asarray(crop) + noise, 0, 255).astype(np.uint8)
        yield images.encode(Image.fromarray(pixels), "JPEG", quality=94)
