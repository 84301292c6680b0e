"""Reads image sets prepared by TensorFlow Datasets, by name, in any order from their own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_imagenet.data import records
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.data.sources.tfrecord import Keys, ShardSource, image_and_label
from hybrid_imagenet.errors import UserError, did_you_mean

_OTHERS = (
    *("digits", "synthetic", "synthetic_tensors", "tfrecord", "folder", "webdataset", "parquet", "huggingface", "idx"),
    *("fashion_mnist", "imagenet2012"),
)
"""Datasets of other sources, and those of TFDS that most people ask for."""
_SPLITS = {"train": ("train",), "validation": ("validation", "test")}


def open_tfds(name: str, data_dir: Path | None, split: str, *, ignore_damage: bool = False) -> Source:
    """Opens a split of a prepared TFDS data set; nothing is downloaded or prepared here.

    Raises:
      UserError: without tensorflow_datasets, for an unknown or unprepared set, or one that has no image and label.
    """
    found = find(name, data_dir, split)
    if found.file_format == "array_record":
        return _ArrayRecordSource(found.files, found.class_names, found.keys)
    return ShardSource(
        found.files,
        found.class_names,
        keys=(found.keys,),
        ignore_damage=ignore_damage,
        expected=found.shard_lengths,
    )


class Prepared(NamedTuple):
    """A split that TFDS has prepared: its files, their form, the records in each, and what the records hold."""

    files: tuple[Path, ...]
    file_format: str
    shard_lengths: Sequence[int]
    keys: Keys
    class_names: tuple[str, ...]


def find(name: str, data_dir: Path | None, split: str) -> Prepared:
    """Finds a prepared split without reading its records; raises as `open_tfds`."""
    builder = _builder(name, data_dir)
    splits = builder.info.splits
    chosen = next((splits[key] for key in _SPLITS[split] if key in splits), None)
    if chosen is None:
        raise UserError(
            f"--dataset={name}: has no {' or '.join(_SPLITS[split])} split, but {', '.join(splits) or 'none'}"
        )
    keys, names = _features(name, builder.info)
    files = tuple(Path(path) for path in chosen.filepaths)
    absent = next((path for path in files if not path.is_file()), None)
    if absent is not None:
        raise UserError(f"--dataset={name}: {absent} is missing; prepare the data set again")
    file_format = builder.info.file_format.value
    if file_format not in ("tfrecord", "array_record"):
        raise UserError(f"--dataset={name}: is stored as {file_format}; prepare it as tfrecord or array_record")
    return Prepared(files, file_format, chosen.shard_lengths, keys, names)


def _builder(name: str, data_dir: Path | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise UserError(f"--dataset={name}: needs tensorflow-datasets (pip install tensorflow-datasets)") from None
    where = f"--data_dir={data_dir}" if data_dir else "~/tensorflow_datasets"
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"{where}: no such directory")
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError):
        near = did_you_mean(name, _OTHERS) or did_you_mean(name, tfds.list_builders(with_community_datasets=False))
        raise UserError(
            f"--dataset={name}: unknown; give {', '.join(_OTHERS)} or another dataset of TensorFlow Datasets{near}"
        ) from None
    if not builder.info.splits:
        raise UserError(f"--dataset={name}: is not prepared in {where}; run `tfds build {name}` (see docs/input.md)")
    return builder


def _features(name: str, info: Any) -> tuple[Keys, tuple[str, ...]]:
    """Returns the names of the image and label features, and the class names."""
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


class _ArrayRecordSource(Source):
    """Reads the records of array_record files, which have an index of their own."""

    def __init__(self, files: tuple[Path, ...], class_names: tuple[str, ...], keys: Keys) -> None:
        super().__init__()
        try:
            from array_record.python.array_record_data_source import ArrayRecordDataSource
        except ImportError:
            raise UserError("this TFDS set is stored as array_record: pip install array-record") from None
        self._records = ArrayRecordDataSource([str(path) for path in files])
        self._place = str(files[0].parent)
        self.listing = [path.name for path in files]
        self._keys = keys
        self.num_examples = len(self._records)
        self.class_names = class_names
        self.num_classes = len(class_names)

    def locate(self, index: int) -> tuple[str, int]:
        return self._place, index

    def read_one(self, index: int) -> tuple[bytes, int]:
        try:
            payload = self._timed(index)
            features = records.decode_example(payload, (self._keys.image, self._keys.label))
        except (records.RecordError, ValueError, RuntimeError, IndexError) as error:
            raise BadRecord(*self.locate(index), str(error)) from None
        image, label = image_and_label(features, (self._keys,), *self.locate(index))
        return image, self._checked_label(index, label)

    def _timed(self, index: int) -> bytes:
        import time

        started = time.perf_counter()
        payload: bytes = self._records[index]
        self.io.add(len(payload), 1, time.perf_counter() - started)
        return payload
