"""Verifies a data set: every record, and for prepared shards their counts, sizes and checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hybrid_imagenet.comm.quiet import import_tensorflow
from hybrid_imagenet.data import DatasetRequest, images
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.source import BadRecord, Source
from hybrid_imagenet.tools.data import parallel

_CHUNK = 512
_BLOCK = 1 << 24


def check(request: DatasetRequest, workers: int) -> Iterator[DatasetNote]:
    """Yields a line for each fault, with file, place and reason, and for what else is worth
    knowing.
    """
    source = request.open()
    yield from source.notes
    if isinstance(source, tfrecord.ShardSource):
        directory = source.files[0].parent
        manifest = tfrecord.read_manifest(directory)
        if manifest is not None:
            entry = manifest["splits"][request.split]
            yield from map(DatasetNote, _against_manifest(source.files, entry["shards"]))
            for kind, lines in (
                ("", entry.get("notes", [])),
                ("left out ", entry.get("bad_records", [])),
            ):
                for line in lines:
                    known = f"{kind}when the set was prepared: {json.dumps(line)[1:-1]}"
                    yield DatasetNote(f"{directory / tfrecord.MANIFEST}: {request.split}: {known}")
    parts = [
        range(source.num_examples)[first : first + _CHUNK]
        for first in range(0, source.num_examples, _CHUNK)
    ]
    progress = parallel.Progress(f"{request.split} records", source.num_examples)
    labels = np.full(source.num_examples, -1, np.int64)
    for part, (faults, found) in parallel.run(_check_part, request, parts, workers):
        progress.add(len(part))
        labels[part] = found
        yield from map(DatasetNote, faults)
    counts = np.bincount(labels[labels >= 0], minlength=source.num_classes)
    empty = np.flatnonzero(counts == 0)
    if request.split == "train" and counts.any() and len(empty):
        first = source.class_names[empty[0]]
        yield DatasetNote(
            f"{len(empty)} of {len(counts)} classes have no training image, the first is {first}",
            False,
        )


def _check_part(source: Source, part: range) -> tuple[list[str], list[int]]:
    """Returns the faults of some records, and their labels; -1 for one that cannot be read."""
    import_tensorflow()
    faults, labels = [], []
    for index in part:
        label = -1
        try:
            content, label = source.read_one(index)
            images.verify(content)
        except BadRecord as error:
            faults.append(str(error))
        except ValueError as error:
            faults.append(str(BadRecord(*source.locate(index), str(error))))
        labels.append(label)
    return faults, labels


def _against_manifest(
    files: Sequence[Path], promised: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    for path, entry in zip(files, promised, strict=True):
        size = path.stat().st_size
        if size != entry["bytes"]:
            yield f"{path}: has {size} bytes, the manifest says {entry['bytes']}"
        elif (found := _checksum(path)) != entry["crc32c"]:
            yield f"{path}: its CRC-32C is {found}, the manifest says {entry['crc32c']}"


def _checksum(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return str(checksum.hexdigest().decode())
