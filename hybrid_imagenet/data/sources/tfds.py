"""Reads image sets prepared by TensorFlow Datasets, by name, in any order from their own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_imagenet.data.datasets import NAMES, SOURCES, DatasetRequest, SplitSummary
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.data.sources.tfrecord import Keys, ShardSource, has_shards
from hybrid_imagenet.errors import UserError, did_you_mean, import_optional

_SPLITS = {"train": ("train",), "validation": ("validation", "test")}


def find(request: DatasetRequest) -> SplitSummary:
    """Finds a prepared split without reading its records; raises as `open_split`."""
    files, _, _, names = _prepared(request)
    return SplitSummary(f"prepared in {files[0].parent}", len(names))


def open_split(request: DatasetRequest) -> Source:
    """Opens a split of a prepared TFDS dataset; nothing is downloaded or prepared here.

    Raises:
      UserError: without tensorflow_datasets, for an unknown or unprepared set, or one that has no
        image and label.
    """
    files, images, keys, names = _prepared(request)
    return ShardSource(files, names, keys=(keys,), expected=images)


def _prepared(request: DatasetRequest) -> tuple[tuple[Path, ...], int, Keys, tuple[str, ...]]:
    """Returns the files of a split, the images in it, the features that hold these, and the names
    of classes.
    """
    name = request.name
    builder = _builder(name, request.directory if request.data_dir else None)
    splits = builder.info.splits
    chosen = next((splits[key] for key in _SPLITS[request.split] if key in splits), None)
    if chosen is None:
        raise UserError(
            f"--dataset={name}: has no {' or '.join(_SPLITS[request.split])} split, but"
            f" {', '.join(splits) or 'none'}"
        )
    keys, names = _features(name, builder.info)
    files = tuple(Path(path) for path in chosen.filepaths)
    absent = next((path for path in files if not path.is_file()), None)
    if absent is not None:
        raise UserError(f"--dataset={name}: {absent} is missing; prepare the dataset again")
    file_format = builder.info.file_format.value
    if file_format != "tfrecord":
        raise UserError(f"--dataset={name}: is stored as {file_format}; prepare it as tfrecord")
    return files, chosen.num_examples, keys, names


def _builder(name: str, data_dir: Path | None) -> Any:
    missing = f"--dataset={name}: needs tensorflow-datasets (pip install tensorflow-datasets)"
    tfds = import_optional("tensorflow_datasets", missing)
    where = f"--data_dir={data_dir}" if data_dir else "~/tensorflow_datasets"
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"{where}: no such directory")
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError):
        near = did_you_mean(name, SOURCES) or did_you_mean(
            name, tfds.list_builders(with_community_datasets=False)
        )
        raise UserError(f"--dataset={name}: unknown; give {NAMES}{near}") from None
    if not builder.info.splits:
        hint = ""
        if data_dir is not None and has_shards(data_dir, "train"):
            hint = "; it looks like --dataset=tfrecord"
        elif data_dir is not None and (data_dir / "train").is_dir():
            hint = "; it looks like --dataset=folder"
        raise UserError(
            f"--dataset={name}: is not prepared in {where}; run `tfds build {name}` (see"
            f" docs/input.md){hint}"
        )
    return builder


def _features(name: str, info: Any) -> tuple[Keys, tuple[str, ...]]:
    import tensorflow_datasets as tfds

    features = info.features
    images = [key for key, value in features.items() if isinstance(value, tfds.features.Image)]
    labels = [key for key, value in features.items() if isinstance(value, tfds.features.ClassLabel)]
    if info.supervised_keys:
        images = [key for key in images if key == info.supervised_keys[0]] or images
        labels = [key for key in labels if key == info.supervised_keys[1]] or labels
    if not images or not labels:
        raise UserError(f"--dataset={name}: has no image with a class label")
    return Keys(images[0], labels[0], 0), tuple(features[labels[0]].names)
