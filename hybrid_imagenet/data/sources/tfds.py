"""Reads image datasets that TensorFlow Datasets has prepared.

They are opened by name. Their files are read directly, so that any order is possible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hybrid_imagenet.data.datasets import NAMES, SOURCES, DatasetRequest, SplitSummary
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.data.sources.tfrecord import ExampleFormat, ShardSource, has_shards
from hybrid_imagenet.errors import UserError, did_you_mean, import_optional

# Many TFDS datasets have a test split instead of a validation split.
_TFDS_SPLITS = {"train": ("train",), "validation": ("validation", "test")}


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Finds a prepared split without reading its records; raises as `open_split`."""
    prepared = _find_prepared(request)
    return SplitSummary(f"prepared in {prepared.files[0].parent}", len(prepared.class_names))


def open_split(request: DatasetRequest) -> Source:
    """Opens a split of a TFDS dataset that was prepared before.

    Nothing is downloaded or prepared here.

    Raises:
      UserError: If tensorflow_datasets is not installed, if the dataset is unknown or not prepared,
        or if it has no image with a label.
    """
    prepared = _find_prepared(request)
    return ShardSource(
        prepared.files,
        prepared.class_names,
        formats=(prepared.example_format,),
        expected_examples=prepared.num_examples,
    )


class _PreparedSplit(NamedTuple):
    """A split of a TFDS dataset.

    Attributes:
      files: Its shards, in order.
      num_examples: Number of records in them.
      example_format: The features that hold image and label.
      class_names: One name per class.
    """

    files: tuple[Path, ...]
    num_examples: int
    example_format: ExampleFormat
    class_names: tuple[str, ...]


def _find_prepared(request: DatasetRequest) -> _PreparedSplit:
    name = request.name
    builder = _load_builder(name, request.directory if request.data_dir else None)
    splits = builder.info.splits
    split_names = _TFDS_SPLITS[request.split]
    tfds_split = next((splits[key] for key in split_names if key in splits), None)
    if tfds_split is None:
        raise UserError(
            f"--dataset={name} has no {' or '.join(split_names)} split. Its splits are:"
            f" {', '.join(splits) or 'none'}. Use another dataset."
        )
    example_format, class_names = _find_features(name, builder.info)
    files = tuple(Path(path) for path in tfds_split.filepaths)
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise UserError(
            f"{missing} of --dataset={name} is missing. Prepare the dataset again with tfds build."
        )
    file_format = builder.info.file_format.value
    if file_format != "tfrecord":
        raise UserError(
            f"--dataset={name} is stored as {file_format}, which is not supported. Prepare it with"
            " tfds build --file_format=tfrecord."
        )
    return _PreparedSplit(files, tfds_split.num_examples, example_format, class_names)


def _load_builder(name: str, data_dir: Path | None) -> Any:
    """Returns the TFDS builder of a prepared dataset.

    Raises:
      UserError: If the dataset is unknown or not prepared.
    """
    tfds = import_optional(
        "tensorflow_datasets",
        f"--dataset={name} needs tensorflow-datasets (pip install tensorflow-datasets).",
    )
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"--data_dir={data_dir} is not a directory. Correct the path.")
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError):
        suggestion = did_you_mean(name, SOURCES)
        if not suggestion:
            suggestion = did_you_mean(name, tfds.list_builders(with_community_datasets=False))
        raise UserError(f"--dataset={name} is unknown. Use {NAMES}{suggestion}.") from None
    if not builder.info.splits:
        location = f"--data_dir={data_dir}" if data_dir else "~/tensorflow_datasets"
        raise UserError(
            f"--dataset={name} was not found in {location}. Run `tfds build {name}` (see"
            f" docs/input.md), or set --data_dir to its directory.{_other_dataset_hint(data_dir)}"
        )
    return builder


def _other_dataset_hint(data_dir: Path | None) -> str:
    """Returns a sentence that names the dataset that a directory holds, or ""."""
    if data_dir is None:
        return ""
    if has_shards(data_dir, "train"):
        return " It looks like --dataset=tfrecord."
    if (data_dir / "train").is_dir():
        return " It looks like --dataset=folder."
    return ""


def _find_features(name: str, info: Any) -> tuple[ExampleFormat, tuple[str, ...]]:
    """Returns the features with the image and its label, and the names of the classes."""
    import tensorflow_datasets as tfds

    features = info.features
    images = [key for key, value in features.items() if isinstance(value, tfds.features.Image)]
    labels = [key for key, value in features.items() if isinstance(value, tfds.features.ClassLabel)]
    # Prefer the pair that the dataset declares for supervised training.
    if info.supervised_keys:
        images = [key for key in images if key == info.supervised_keys[0]] or images
        labels = [key for key in labels if key == info.supervised_keys[1]] or labels
    if not images or not labels:
        raise UserError(
            f"--dataset={name} has no image with a class label. Use a dataset for image"
            " classification."
        )
    example_format = ExampleFormat(images[0], labels[0], first_label=0)
    return example_format, tuple(features[labels[0]].names)
