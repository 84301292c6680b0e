"""Verifies a data set: every record, and for prepared shards their counts, sizes and checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from hybrid_imagenet.data import images, shards
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
    source = name.open()
    if isinstance(source, ShardSource):
        yield from (f"{file}, offset {offset}: {reason}" for file, offset, reason in source.index.damaged)
        manifest = shards.read_manifest(source.index.files[0].parent)
        if manifest is not None:
            yield from _against_manifest(source, manifest["splits"][name.split])
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
            _check_image(content)
        except BadRecord as error:
            faults.append(str(error))
        except (OSError, ValueError, SyntaxError) as error:
            faults.append(str(BadRecord(*source.locate(index), f"the image does not decode ({error})")))
    return faults


def _check_image(content: bytes) -> None:
    """Decodes the whole image; raises ValueError, OSError or SyntaxError (for broken PNGs) if it cannot."""
    images.probe(content)
    with images.picture(content) as opened:
        opened.load()


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
