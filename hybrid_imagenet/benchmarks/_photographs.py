"""Makes photographs to measure with: 1,000 JPEGs of 500x375 pixels and about 110 kB, made of
scikit-learn's two.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hybrid_imagenet import data, files
from hybrid_imagenet.data import images
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.tools.data import prepare

_NAME = "benchmark-photographs-1"
_COUNT = 1000


def photograph_shards(resize: int | None) -> Path:
    """TFRecord shards of the photographs, made once; with `resize`, of images with that shorter
    side.
    """
    photographs = photograph_folder()
    directory = photographs.with_name(f"{photographs.name}-shards-{resize or 'full'}")
    if not (directory / tfrecord.MANIFEST).is_file():
        settings = prepare.PrepareSettings(resize=resize, per_shard=128)
        prepare.prepare_dataset(
            data.DatasetRequest("folder", str(photographs)),
            directory,
            settings,
            os.cpu_count() or 1,
        )
    return directory


def photograph_folder() -> Path:
    """A folder set of 1,000 JPEGs in the user's cache, made once: varied crops of two photographs,
    with noise.
    """
    directory = files.cache_root() / _NAME
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        made = Path(temporary) / "made"
        for split, count in (("train", _COUNT), ("validation", 10)):
            for number, content in enumerate(_made_photographs(count)):
                path = made / split / f"class{number % 10}" / f"{number:04d}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        made.rename(directory)
    return directory


def _made_photographs(count: int) -> Iterator[bytes]:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(image) for image in load_sample_images().images]  # 640 x 427 each
    generator = np.random.default_rng(0)
    for number in range(count):
        scale = generator.uniform(0.6, 1.1)
        width, height = int(500 * scale), int(375 * scale)
        x, y = (
            int(generator.integers(0, limit - side + 1))
            for limit, side in ((640, width), (427, height))
        )
        crop = originals[number % 2].resize(
            (500, 375), Image.Resampling.BICUBIC, (x, y, x + width, y + height)
        )
        pixels = np.clip(np.asarray(crop) + generator.normal(0, 11, (375, 500, 3)), 0, 255).astype(
            np.uint8
        )
        yield images.encode(Image.fromarray(pixels), "JPEG", quality=94)
