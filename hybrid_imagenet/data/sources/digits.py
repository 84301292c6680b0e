"""Writes the handwritten digits as JPEG shards once, and opens them.

The package contains the images: 1,797 of the digits of E. Alpaydin and C. Kaynak (UCI Machine
Learning Repository), as scikit-learn distributes them. NOTICE has their license.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.images import encode
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import SampleOrder

# Height and width in pixels of the JPEGs. The originals have 8 x 8 pixels.
SIDE = 64
CLASS_NAMES = tuple("0123456789")
_NUM_VALIDATION_IMAGES = 297
_NUM_SHARDS = {"train": 4, "validation": 1}
# The directory of the shards. Change it when their content changes.
_DIRECTORY_NAME = "digits-1"
_MAX_ORIGINAL_VALUE = 16
_ORIGINALS = Path(__file__).with_name("digits.npz")


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Returns where the digits are or will be written."""
    directory = _directory(request)
    return SplitSummary(f"kept in {directory.parent}", len(CLASS_NAMES))


def open_split(request: DatasetRequest) -> tfrecord.ShardSource:
    """Opens the digits, after writing them if this is the first time.

    They are in `data_dir`, by default in the user's cache.

    Raises:
      UserError: If the directory cannot be written.
    """
    directory = _directory(request)
    if not directory.is_dir():
        try:
            _write_shards(directory)
        except OSError as error:
            raise UserError(
                f"The digits cannot be written to {directory.parent} ({error}). Correct its"
                " permissions, or set --data_dir to another directory."
            ) from None
    return tfrecord.ShardSource(tfrecord.find_shards(directory, request.split), CLASS_NAMES)


def load_splits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns the original images and their classes; see `hybrid_imagenet.data.digits`."""
    images, labels = _load_digits()
    is_validation = _choose_validation(labels)
    training = (images[~is_validation], labels[~is_validation])
    validation = (images[is_validation], labels[is_validation])
    return training, validation


def _directory(request: DatasetRequest) -> Path:
    parent = request.directory if request.data_dir else files.cache_root()
    return parent / _DIRECTORY_NAME


def _write_shards(directory: Path) -> None:
    """Writes all shards to a temporary directory, and then renames it.

    Therefore `directory` is complete or does not exist, even if several ranks write it at once: the
    first one to finish wins.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        images, labels = _load_digits()
        is_validation = _choose_validation(labels)
        for split, in_split in (("train", ~is_validation), ("validation", is_validation)):
            indices = np.flatnonzero(in_split)
            num_shards = _NUM_SHARDS[split]
            for shard in range(num_shards):
                path = temporary / f"{split}-{shard:05d}-of-{num_shards:05d}"
                with path.open("wb") as file:
                    for index in indices[shard::num_shards]:
                        example = _encode_example(images[index], int(labels[index]))
                        file.write(tfrecord.frame(example))
        # mkdtemp allows only this user to read the directory.
        temporary.chmod(0o755)
        try:
            os.rename(temporary, directory)  # noqa: PTH104 - Path.rename is the same call
        except OSError:
            # Another rank may have been first.
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Reads the originals.

    Returns:
      All images, uint8 [1797, 8, 8] with values from 0 to 16, and their classes, uint8 [1797].
    """
    with np.load(_ORIGINALS, allow_pickle=False) as originals:
        return originals["images"], originals["labels"]


def _choose_validation(labels: np.ndarray) -> np.ndarray:
    """Chooses 297 images for validation, always the same, stratified by class.

    Args:
      labels: The class of each image, int [n].

    Returns:
      Whether each image is for validation, bool [n].
    """
    class_sizes = np.bincount(labels)
    exact_quotas = class_sizes * _NUM_VALIDATION_IMAGES / len(labels)
    quotas = np.floor(exact_quotas).astype(int)
    # The classes that lost most by rounding down get the remaining images, one each.
    num_remaining = _NUM_VALIDATION_IMAGES - quotas.sum()
    quotas[np.argsort(quotas - exact_quotas, kind="stable")[:num_remaining]] += 1
    is_validation = np.zeros(len(labels), bool)
    for label, quota in enumerate(quotas):
        members = np.flatnonzero(labels == label)
        positions = SampleOrder(len(members), seed=label).at(0, np.arange(quota))
        is_validation[members[positions]] = True
    return is_validation


def _encode_example(image: np.ndarray, label: int) -> bytes:
    """Returns an Example with one digit as a smooth RGB JPEG of 64 x 64 pixels.

    Args:
      image: The original, [8, 8], values 0 to 16.
      label: Its class, 0 to 9. The Example counts from 1, as ImageNet's do.
    """
    from PIL import Image

    gray = np.clip(image * (255 / _MAX_ORIGINAL_VALUE), 0, 255).astype(np.uint8)
    resized = Image.fromarray(gray).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return tfrecord.encode_example(
        {
            "image/encoded": encode(resized.convert("RGB"), "JPEG", quality=92),
            "image/class/label": label + 1,
            "image/class/text": CLASS_NAMES[label].encode(),
        }
    )
