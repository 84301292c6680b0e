"""Writes scikit-learn's 1,797 handwritten digits (UCI, Alpaydin and Kaynak) once as JPEG shards,
and opens them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.images import encoded
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.errors import UserError, import_optional
from hybrid_imagenet.order.sampling import SampleOrder

SIDE = 64  # pixels; the originals have 8
CLASS_NAMES = tuple("0123456789")
_HELD_OUT = 297
_SHARDS = {"train": 4, "validation": 1}
_VERSION = "digits-1"
_NEEDS = "--dataset=digits: needs scikit-learn (pip install scikit-learn)"


def find(request: DatasetRequest) -> SplitSummary:
    """Looks for the digits, or for what writes them."""
    directory = _directory(request)
    if importlib.util.find_spec("sklearn") is None and not directory.is_dir():
        raise UserError(_NEEDS)
    return SplitSummary(f"kept in {directory.parent}", len(CLASS_NAMES))


def open_split(request: DatasetRequest) -> tfrecord.ShardSource:
    """Opens the digits, writing them first where they are not there yet (under `data_dir` or the
    user's cache).

    Raises:
      UserError: if scikit-learn is missing or the directory cannot be written.
    """
    directory = _directory(request)
    if not directory.is_dir():
        try:
            _write(directory)
        except OSError as error:
            raise UserError(
                f"--data_dir={directory.parent}: cannot write the digits there ({error})"
            ) from None
    return tfrecord.ShardSource(tfrecord.find_shards(directory, request.split), CLASS_NAMES)


def _directory(request: DatasetRequest) -> Path:
    return (request.directory if request.data_dir else files.cache_root()) / _VERSION


def _write(directory: Path) -> None:
    """Writes all shards in a directory of its own and renames it: whole or not at all, whichever
    rank is first.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        images, labels = _load()
        held_out = _held_out(labels)
        for split, keep in (("train", ~held_out), ("validation", held_out)):
            numbers = np.flatnonzero(keep)
            for shard in range(_SHARDS[split]):
                path = temporary / f"{split}-{shard:05d}-of-{_SHARDS[split]:05d}"
                with path.open("wb") as file:
                    for number in numbers[shard :: _SHARDS[split]]:
                        file.write(tfrecord.frame(_example(images[number], int(labels[number]))))
        temporary.chmod(0o755)
        try:
            os.rename(temporary, directory)  # noqa: PTH104 - Path.rename is the same call; its errors are wanted here
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load() -> tuple[np.ndarray, np.ndarray]:
    digits = import_optional("sklearn.datasets", _NEEDS).load_digits()
    return np.asarray(digits.images), np.asarray(digits.target)


def _held_out(labels: np.ndarray) -> np.ndarray:
    """Returns a fixed choice of 297 images with every class in proportion, bool [n]."""
    counts = np.bincount(labels)
    exact = counts * _HELD_OUT / len(labels)
    quota = np.floor(exact).astype(int)
    quota[np.argsort(quota - exact, kind="stable")[: _HELD_OUT - quota.sum()]] += 1
    chosen = np.zeros(len(labels), bool)
    for label, count in enumerate(quota):
        members = np.flatnonzero(labels == label)
        chosen[members[SampleOrder(len(members), seed=label).at(0, np.arange(count))]] = True
    return chosen


def _example(image: np.ndarray, label: int) -> bytes:
    """Renders one 8x8 image (values 0 to 16) as a smooth 64x64 RGB JPEG in an Example, its label
    from 1.
    """
    from PIL import Image

    small = Image.fromarray(np.clip(image * (255 / 16), 0, 255).astype(np.uint8))
    smooth = small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB")
    return tfrecord.encode_example(
        {
            "image/encoded": encoded(smooth, "JPEG", quality=92),
            "image/class/label": label + 1,
            "image/class/text": CLASS_NAMES[label].encode(),
        }
    )
