"""Finds the TFRecord shards of a split, indexes where each record lies, and reads the manifest beside them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import listing, records
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import readable, remembered

MANIFEST = "manifest.json"
_SHARD = re.compile(r"(?P<stem>.+)-\d{5,}-of-\d{5,}(\.tfrecord)?$")
_LIKE_SHARD = re.compile(r"[^.].*(\d-of-\d|\.tfrecord)")
_INDEX_VERSION = 2


def cache_root() -> Path:
    """Returns where generated data and indices are kept: $XDG_CACHE_HOME/hybrid_imagenet, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hybrid_imagenet"


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """Locates each record of a split.

    Attributes:
      files: the shards, sorted.
      shard, offset, length: int64 [n] each; the file number, first byte and bytes (with framing) of each record.
      damaged: what cannot be read, by file number.
    """

    files: tuple[Path, ...]
    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    damaged: tuple[tuple[int, records.Gap], ...] = ()

    def counts(self) -> npt.NDArray[np.int64]:
        """Returns the number of records found in each file, int64 [files]."""
        return np.bincount(self.shard, minlength=len(self.files))


def find(directory: Path, split: str) -> tuple[Path, ...]:
    """Returns the shards of `split` ("train" or "validation") in a directory.

    Raises:
      UserError: if the directory does not exist, holds no shard of the split, lacks one, or holds several sets.
    """
    if not directory.is_dir():
        raise UserError(f"--data_dir={directory}: no such directory")
    _, named = _by_word(directory)
    found = listing.of_split(str(directory), split, named)
    if not found:
        raise UserError(f"--data_dir={directory}: holds no {split} shards (names like {split}-00000-of-01024)")
    return tuple(directory / name for name in listing.whole_set(str(directory), split, found))


def skipped(directory: Path) -> tuple[listing.Note, ...]:
    """Returns a note on what in a directory looks like shards and belongs to no split by its name."""
    return listing.of_no_split(str(directory), *_by_word(directory))


def _by_word(directory: Path) -> tuple[list[str], Callable[[str], list[str]]]:
    """Returns the names in a directory that look like shards, and a function that finds those of a split's word."""
    names = sorted(path.name for path in directory.iterdir() if _LIKE_SHARD.match(path.name))
    words = {name: match["stem"].removesuffix(".tfrecord") for name in names if (match := _SHARD.match(name))}
    return names, lambda word: [name for name, stem in words.items() if stem.rpartition("-")[2] == word]


def index(files: Sequence[Path]) -> ShardIndex:
    """Returns the index of some shards, from the cache if they have not changed since they were scanned."""

    def read(path: Path) -> ShardIndex:
        with np.load(path) as stored:
            damaged = tuple((int(file), records.Gap(*gap)) for file, gap in json.loads(str(stored["damaged"])))
            return ShardIndex(tuple(files), stored["shard"], stored["offset"], stored["length"], damaged)

    def write(path: Path, index: ShardIndex) -> None:
        with path.open("wb") as file:
            text = np.array(json.dumps(index.damaged))
            np.savez(file, damaged=text, shard=index.shard, offset=index.offset, length=index.length)

    return remembered(cached_index(_INDEX_VERSION, files=files), read, lambda: _scan_all(files), write)


def stored_index(
    directory: Path, split: str, files: Sequence[Path], promised: Sequence[Mapping[str, Any]]
) -> ShardIndex | None:
    """Returns the index that `data prepare` wrote beside the shards, if these still have the sizes that it promised."""
    sizes = [path.stat().st_size for path in files]
    if sizes != [entry["bytes"] for entry in promised]:
        return None

    def read() -> ShardIndex:
        with np.load(directory / f"{split}.index.npz") as stored:
            return ShardIndex(tuple(files), stored["shard"], stored["offset"], stored["length"])

    return readable(read)


def cached_index(*kind: str | int, files: Sequence[Path]) -> Path:
    """Returns where an index of a kind (its name and version) of some files is kept until one of them changes."""
    key = hashlib.sha256(repr([*kind, *map(_fingerprint, files)]).encode()).hexdigest()[:24]
    return cache_root() / "index" / f"{key}.npz"


def _fingerprint(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def _scan_all(files: Sequence[Path]) -> ShardIndex:
    try:
        with concurrent.futures.ThreadPoolExecutor(min(16, len(files))) as pool:
            scans = list(pool.map(records.scan, files))
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    shard = np.repeat(np.arange(len(files), dtype=np.int64), [len(offsets) for offsets, _, _ in scans])
    damaged = tuple((number, gap) for number, (_, _, gaps) in enumerate(scans) for gap in gaps)
    return ShardIndex(
        tuple(files), shard, np.concatenate([s[0] for s in scans]), np.concatenate([s[1] for s in scans]), damaged
    )


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Returns the manifest that `data prepare` writes, or None.

    Raises:
      UserError: if there is one that cannot be read.
    """
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        _check_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is not a readable manifest ({error!r}); prepare the data set again") from None
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError if what readers use is missing or of another kind."""
    names = manifest["class_names"]
    shards = [shard for entry in manifest["splits"].values() for shard in entry["shards"]]
    numbers = [entry["num_examples"] for entry in manifest["splits"].values()]
    numbers += [shard[key] for shard in shards for key in ("bytes", "num_examples")]
    sums = [shard["crc32c"] for shard in shards]
    if not isinstance(names, list) or not all(isinstance(text, str) for text in [*names, *sums]):
        raise TypeError("class_names and crc32c hold texts")
    if not all(type(number) is int for number in numbers):
        raise TypeError("num_examples and bytes hold whole numbers")
    for split, entry in manifest["splits"].items():
        if sum(shard["num_examples"] for shard in entry["shards"]) != entry["num_examples"]:
            raise ValueError(f"num_examples of {split} is not the sum of its shards")
