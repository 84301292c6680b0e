"""Data sets: sources of encoded images, their order, decoding and augmentation."""

from __future__ import annotations

from pathlib import Path

from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.errors import UserError

SPLITS = ("train", "validation")


def open_source(
    name: str,
    data_dir: str | None = None,
    split: str = "train",
    *,
    num_classes: int | None = None,
    ignore_damage: bool = False,
) -> Source:
    """Opens one split of a data set.

    Args:
      name: `digits` or `tfrecord`.
      data_dir: where it lies; for `digits` where it is written, by default the user's cache.
      split: "train" or "validation".
      num_classes: of TFRecord shards without a manifest.
      ignore_damage: use the readable part of damaged shards.

    Raises:
      UserError: if there is no such data set or it cannot be used.
    """
    directory = Path(data_dir).expanduser() if data_dir else None
    if name == "digits":
        from hybrid_imagenet.data.sources import digits

        return digits.open_digits(directory, split)
    if name == "tfrecord":
        from hybrid_imagenet.data.sources import tfrecord

        if directory is None:
            raise UserError("--dataset=tfrecord: give the directory of the shards as --data_dir")
        return tfrecord.open_directory(directory, split, num_classes=num_classes, ignore_damage=ignore_damage)
    raise UserError(f"--dataset={name}: no such data set")
