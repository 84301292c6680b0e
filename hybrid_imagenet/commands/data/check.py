"""Verifies every record of a dataset, and the files of prepared shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hybrid_imagenet.cluster.quiet import import_tensorflow
from hybrid_imagenet.commands.data import parallel
from hybrid_imagenet.data import images
from hybrid_imagenet.data.datasets import DatasetRequest
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.source import BadRecord, Source

_RECORDS_PER_TASK = 512
_CHECKSUM_BLOCK_BYTES = 1 << 24
# Stands for the label of a record that cannot be read.
_NO_LABEL = -1


def check_split(request: DatasetRequest, workers: int) -> Iterator[DatasetNote]:
    """Verifies one split.

    Every image is decoded. Of shards with a manifest, the sizes and checksums are compared too.

    Args:
      request: The split.
      workers: Number of processes.

    Yields:
      One note for each fault, with file, offset and reason, and notes on what else is worth
      knowing.

    Raises:
      UserError: If the dataset cannot be opened.
    """
    source = request.open()
    yield from source.notes
    if isinstance(source, tfrecord.ShardSource):
        yield from _check_manifest(source, request.split)
    tasks = [
        range(source.num_examples)[first : first + _RECORDS_PER_TASK]
        for first in range(0, source.num_examples, _RECORDS_PER_TASK)
    ]
    progress = parallel.ProgressPrinter(f"{request.split} records", source.num_examples)
    labels = np.full(source.num_examples, _NO_LABEL, np.int64)
    for indices, (faults, read_labels) in parallel.run(_check_records, request, tasks, workers):
        progress.add(len(indices))
        labels[indices] = read_labels
        yield from map(DatasetNote, faults)
    if request.split == "train":
        yield from _report_empty_classes(source, labels)


def _check_manifest(source: tfrecord.ShardSource, split: str) -> Iterator[DatasetNote]:
    """Compares prepared shards with their manifest, and yields its notes."""
    directory = source.shards[0].parent
    manifest = tfrecord.read_manifest(directory)
    if manifest is None:
        return
    entry = manifest["splits"][split]
    yield from map(DatasetNote, _compare_shards(source.shards, entry["shards"]))
    location = f"{directory / tfrecord.MANIFEST}: {split}"
    for note in entry.get("notes", []):
        yield DatasetNote(f"{location}: when the dataset was prepared: {note}")
    for bad_record in entry.get("bad_records", []):
        yield DatasetNote(f"{location}: omitted when the dataset was prepared: {bad_record}")


def _check_records(source: Source, indices: range) -> tuple[list[str], list[int]]:
    """Decodes some records.

    Returns:
      (faults, labels): one line for each fault, and the label of each record; -1 if it cannot be
      read.
    """
    import_tensorflow()
    faults = []
    labels = []
    for index in indices:
        label = _NO_LABEL
        try:
            content, label = source.read_one(index)
            images.decode_whole(content)
        except BadRecord as error:
            faults.append(str(error))
        except ValueError as error:
            faults.append(str(BadRecord(*source.locate(index), str(error))))
        labels.append(label)
    return faults, labels


def _report_empty_classes(source: Source, labels: np.ndarray) -> Iterator[DatasetNote]:
    """Yields a harmless note if there are classes without a training image."""
    class_sizes = np.bincount(labels[labels >= 0], minlength=source.num_classes)
    empty_classes = np.flatnonzero(class_sizes == 0)
    if class_sizes.any() and len(empty_classes):
        first = source.class_names[empty_classes[0]]
        yield DatasetNote(
            f"{len(empty_classes)} of {len(class_sizes)} classes have no training image, the first"
            f" is {first}",
            fault=False,
        )


def _compare_shards(paths: Sequence[Path], entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each shard whose size or checksum differs from its entry."""
    for path, entry in zip(paths, entries, strict=True):
        size = path.stat().st_size
        if size != entry["bytes"]:
            yield f"{path}: has {size} bytes, but the manifest says {entry['bytes']}"
            continue
        checksum = _checksum(path)
        if checksum != entry["crc32c"]:
            yield f"{path}: its CRC-32C is {checksum}, but the manifest says {entry['crc32c']}"


def _checksum(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(_CHECKSUM_BLOCK_BYTES):
            checksum.update(block)
    return str(checksum.hexdigest().decode())
