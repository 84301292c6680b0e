"""Keeps images that were read once, encoded or decoded, in memory or on a local disk."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet.data import images, shards
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError

KINDS = ("none", "encoded", "decoded")
_LABEL = struct.Struct("<i")


class CachedSource(Source):
    """Wraps a source so that its images are read from storage once.

    What has been stored stays: in a shuffled order every image is as likely to be next as any other, so nothing is
    gained by replacing one with another. When the bound is reached, the rest is read from storage as before.

    Args:
      source: what is read.
      kind: "encoded" stores images as they are, "decoded" stores pixels, which saves decoding and takes more room.
      limit: bytes that are stored in all, at most.
      directory: None for memory, else where files are kept: all ranks of a machine share them, and later runs too.

    Raises:
      UserError: if the directory cannot be written.
    """

    def __init__(self, source: Source, kind: str, limit: int, directory: Path | None) -> None:
        super().__init__()
        self._source = source
        self._decoded = kind == "decoded"
        self._limit = limit
        self._memory: dict[int, bytes] = {}
        self._directory = None
        self._stored = 0
        self.io = source.io
        self.num_examples, self.num_classes = source.num_examples, source.num_classes
        self.class_names, self.ready, self.losses = source.class_names, source.ready, source.losses
        self.notes, self.shard_sizes = source.notes, source.shard_sizes
        if directory is not None:
            ends = [source.locate(index) for index in (0, source.num_examples - 1)]
            key = hashlib.sha256(repr([kind, source.num_examples, source.class_names, ends]).encode()).hexdigest()[:16]
            self._directory = directory / f"images-{key}"
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._stored = sum(path.stat().st_size for path in self._directory.glob("*/*"))
            except OSError as error:
                raise UserError(
                    f"--data_cache_dir={directory}: cannot be written ({error.strerror or error})"
                ) from None

    def locate(self, index: int) -> tuple[str, int]:
        return self._source.locate(index)

    def prefetch(self, shards: Sequence[int]) -> None:
        self._source.prefetch(shards)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads from the cache if the image is there, else from the source, and remembers it while there is room."""
        entry = self._load(index)
        if entry is not None:
            return entry[_LABEL.size :], _LABEL.unpack_from(entry)[0]
        content, label = self._source.read_one(index)
        if self._decoded:
            content = self._pixels(index, content)
        self._store(index, _LABEL.pack(label) + content)
        return content, label

    def _pixels(self, index: int, content: bytes) -> bytes:
        try:
            return images.raw(images.picture(content))
        except ValueError as error:
            raise BadRecord(*self.locate(index), str(error)) from None

    def _path(self, directory: Path, index: int) -> Path:
        return directory / f"{index % 1000:03d}" / str(index)

    def _load(self, index: int) -> bytes | None:
        if self._directory is None:
            return self._memory.get(index)
        try:
            return self._path(self._directory, index).read_bytes()
        except OSError:
            return None

    def _store(self, index: int, entry: bytes) -> None:
        if self._stored + len(entry) > self._limit:
            return
        self._stored += len(entry)
        if self._directory is None:
            self._memory[index] = entry
            return
        with contextlib.suppress(OSError), shards.replacing(self._path(self._directory, index)) as temporary:
            temporary.write_bytes(entry)  # a full disk only means that no more is stored
