"""Flags for the data set, its reading and its augmentation."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option
from hybrid_imagenet.data import registry


@dataclasses.dataclass(frozen=True)
class Data:
    """Data and augmentation."""

    dataset: str = option(
        "imagenet2012",
        f"{registry.HELP}.",
        basic=True,
    )
    data_dir: str | None = option(
        None,
        f"Where the dataset is (TFDS data_dir, shard directory or image tree); for {registry.AT_URLS} also a URL such "
        "as https://host/path, with --data_cache_dir for copies of its files.",
        basic=True,
    )
    storage_timeout: float = option(
        120.0,
        "End the run after a URL has failed for this time; until then retry.",
        unit="s",
        minimum=0,
    )
    shuffle_window: int | None = option(
        None,
        "Mix the images of this many shards (files) at a time, the shards in a new order each epoch; 0 mixes "
        "all images. Default 0; for a URL 16, or 4 Parquet files.",
        unit="shards",
        minimum=0,
    )
    val_fraction: float = option(
        0.0,
        "With --dataset=folder and no directory of validation images: validate this part of each class, always the "
        "same images, and train on the others.",
        minimum=0,
        maximum=0.9,
        basic=True,
    )
    tuning_split: float = option(
        0.0,
        "Keep this many training images (below 1: this part) for tuning: drawn by --seed, never trained on, and "
        "validated instead of the validation images.",
        unit="images",
        minimum=0,
    )
    eval_split: str = option(
        "tuning",
        "With --tuning_split: validate the images kept for tuning, or, for the final report, the validation images.",
        choices=("tuning", "validation"),
    )
    augmentation: str = option(
        "auto",
        "Training augmentation; shift (flips and whole-pixel shifts) is for small images. auto follows the dataset: "
        "digits for digits and other characters, shift for small pictures, else alexnet.",
        choices=("auto", "none", "alexnet", "inception", "sony", "digits", "shift"),
        basic=True,
    )
    augment_pad: int = option(
        0,
        "Black border of --augmentation=sony on each side, in pixels of a stored image of 320.",
        unit="pixels",
        minimum=0,
        maximum=320,
    )
    augment_brightness: float = option(
        0.0, "Largest brightness offset of --augmentation=sony, for pixels in [0, 1].", minimum=0, maximum=1
    )
    augment_noise: float = option(
        0.0, "Largest deviation of the pixel noise of --augmentation=sony, in [0, 1].", minimum=0, maximum=1
    )
    eval_crop: float | None = option(
        None,
        "Side of the central square that is evaluated, as a fraction of the shorter side; default 0.875 (224 of "
        "256), or 1 with --augmentation=digits or shift.",
        minimum=0.05,
        maximum=1,
    )
    num_examples: int | None = option(None, "Training images of a synthetic set; default ImageNet's.", minimum=1)
    num_classes: int | None = option(
        None, "Classes of files that do not name them, in a manifest, labels.txt or metadata.", minimum=1
    )
    decoder: str = option(
        "tensorflow",
        "What decodes JPEGs: TensorFlow, or NVIDIA DALI (on the GPU where there is one; needs the extra dali).",
        choices=("tensorflow", "dali"),
    )
    data_threads: int | None = option(
        None, "Decoding threads per rank; default the machine's cores divided by its ranks.", minimum=1
    )
    data_memory_gb: float = option(
        4.0,
        "Bound on the memory for reading and decoding ahead (half) and for row groups or the cache (half), per rank.",
        unit="GB",
        minimum=0.01,
    )
    data_cache: str = option(
        "none",
        "Keep images in memory after they were first read (half of --data_memory_gb): encoded as they are, or decoded "
        "to pixels (no decoding later, about five times the room).",
        choices=("none", "encoded", "decoded"),
    )
    data_cache_dir: str | None = option(
        None,
        "Local directory for copies of the files of a URL, shared by the ranks of a machine and by later runs.",
    )
    bad_records: str = option(
        "fail",
        "What a record that cannot be read or decoded does: end the run, or be counted, logged and replaced.",
        choices=("fail", "skip"),
    )
    max_bad_records: int = option(100, "Bad records of all ranks above which the run ends.", minimum=0)
    remainder: str = option(
        "wrap",
        "What a last, partial batch of an epoch becomes: filled up from the next epoch (every example exactly once "
        "per epoch), or dropped.",
        choices=("wrap", "drop"),
    )
    loss: str = option(
        "softmax",
        "Cross-entropy over all classes together, or for each class by itself (binary), summed.",
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = option(
        0.0, "Probability moved from the true label to all labels.", minimum=0, maximum=1, basic=True
    )
    mixup: float = option(0.0, "alpha of mixup; 0 for none (Zhang et al. take 0.2 on ImageNet).", minimum=0)
