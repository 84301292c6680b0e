"""Flags for the data set, its reading and its augmentation."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option


@dataclasses.dataclass(frozen=True)
class Data:
    """Data and augmentation."""

    dataset: str = option(
        "imagenet2012",
        "digits, synthetic, tfrecord, folder, parquet, or the name of a TFDS image classification set.",
    )
    data_dir: str | None = option(None, "Where the data set lies (TFDS data_dir, shard directory or image tree).")
    augmentation: str = option(
        "alexnet", "Training augmentation.", choices=("none", "alexnet", "inception", "sony", "digits")
    )
    remainder: str = option(
        "wrap",
        "What a last, partial batch of an epoch becomes: filled up from the next epoch (every example exactly once "
        "per epoch), or dropped.",
        choices=("wrap", "drop"),
    )
    label_smoothing: float = option(0.0, "Probability moved from the true label to all labels.", minimum=0, maximum=1)
