"""Verifies a data set: every record, and for prepared shards their counts, sizes and checksums."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from hybrid_imagenet.data import shards, strict_decode
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.data.sources.tfrecord import ShardSource
from hybrid_imagenet.tools.data import parallel

_CHUNK = 512
_BLOCK = 1 << 24


@dataclasses.dataclass(frozen=True)
class _Part:
    first: int
    last: int


def check(name: parallel.SourceName, workers: int) -> Iterator[str]:
    """Yields a line for each fault: file, place and reason."""
    name = dataclasses.replace(name, ignore_damage=True)
    source = name.open()
    yield from map(str, source.losses)
    if isinstance(source, ShardSource):
        directory = source.index.files[0].parent
        manifest = shards.read_manifest(directory)
        if manifest is not None:
            yield from _against_manifest(source, manifest["splits"][name.split])
            yield from _left_out(directory / shards.MANIFEST, name.split, manifest["splits"][name.split])
    parts = [_Part(first, min(first + _CHUNK, source.num_examples)) for first in range(0, source.num_examples, _CHUNK)]
    progress = parallel.Progress(f"{name.split} records", source.num_examples)
    for part, faults in parallel.run(_check_part, name, parts, workers):
        progress.add(part.last - part.first)
        yield from faults


def _check_part(source: Source, part: _Part) -> list[str]:
    faults = []
    for index in range(part.first, part.last):
        try:
            content, _ = source.read_one(index)
            strict_decode.verify(content)
        except BadRecord as error:
            faults.append(str(error))
        except ValueError as error:
            faults.append(str(BadRecord(*source.locate(index), str(error))))
    return faults


def _left_out(manifest: Path, split: str, promised: dict[str, Any]) -> Iterator[str]:
    """Tells what `data prepare` has left out."""
    for bad in promised.get("bad_records", []):
        yield f"{manifest}: {split}: left out when the set was prepared: {json.dumps(bad)[1:-1]}"


def _against_manifest(source: ShardSource, promised: dict[str, Any]) -> Iterator[str]:
    for path, entry in zip(source.index.files, promised["shards"], strict=False):
        size = path.stat().st_size
        if size != entry["bytes"]:
            yield f"{path}: has {size} bytes, the manifest says {entry['bytes']}"
        elif (found := _checksum(path)) != entry["crc32c"]:
            yield f"{path}: its CRC-32C is {found}, the manifest says {entry['crc32c']}"
    if source.num_examples != promised["num_examples"]:
        directory = source.index.files[0].parent
        yield f"{directory}: {source.num_examples} records, the manifest says {promised['num_examples']}"


def _checksum(path: Path) -> str:
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return str(checksum.hexdigest().decode())
