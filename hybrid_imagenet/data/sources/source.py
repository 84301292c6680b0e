"""Defines a source of images: random access, a name for each record's place, and counters of what
it read.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.errors import StorageError

Index = TypeVar("Index")
_CHUNK = 1 << 16  # names that are joined at a time
_COMPARED = ("class names", "sizes of shards", "file names")
_OPEN_FILES = 512  # below the usual limit of 1,024 descriptors per process


class BadRecord(Exception):  # noqa: N818 - it names the record, not the error
    """A record that cannot be used: its file, its place there (bytes, or a row number) and the
    reason.
    """

    def __init__(self, file: str, offset: int, reason: str) -> None:
        super().__init__(f"{file}, offset {offset}: {reason}")
        self.file = file
        self.offset = offset
        self.reason = reason


class Reads:
    """Counts reads from storage by several threads.

    Attributes:
      bytes_read, operations: since the source was opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_read = self.operations = 0

    def add(self, bytes_read: int, operations: int = 1) -> None:
        """Counts some read operations."""
        with self._lock:
            self.bytes_read += bytes_read
            self.operations += operations


class Source(abc.ABC):
    """Gives random access to the encoded images of one split, safe to use from several threads.

    Attributes:
      num_examples: images in the split.
      num_classes: labels lie in [0, num_classes).
      class_names: one name per class, in the order of the labels.
      ready: the pipeline may decode one batch and repeat its pixels, so that batches cost nothing.
      side: all images are squares of this many pixels, which `read_pixels` gives without decoding;
      None where not.
      notes: what is not read, or read on an assumption, one line for each kind.
      shard_sizes: examples in each file, int64 [s], in the order of their numbers; None where files
      do not matter.
      class_list: the file that names the classes, where it cannot be compared with the labels
      before they are read.
      labels_seen: the labels that were read, with a `class_list`.
      listing: names of the files in their order, relative to the directory of the data set, so that
        they are the same on all hosts; empty where there are none.
    """

    num_examples: int
    num_classes: int
    class_names: tuple[str, ...]
    ready: bool = False
    side: int | None = None
    notes: tuple[DatasetNote, ...] = ()
    shard_sizes: npt.NDArray[np.int64] | None = None
    listing: Sequence[str] = ()
    class_list: str | None = None

    def __init__(self) -> None:
        self.reads = Reads()
        self.labels_seen: set[int] = set()

    @abc.abstractmethod
    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns the encoded image and the label of one example.

        Raises:
          BadRecord: if the record cannot be read, or its label is not a class.
        """

    @abc.abstractmethod
    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of an example and its place there: byte offset, or row number."""

    def prefetch(self, shards: Sequence[int]) -> None:  # noqa: B027 - of use to files that are copied first
        """Says which shards are read now and next; returns at once."""

    def read(
        self, indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Returns encoded images and labels, int32 [k]; raises BadRecord at the first record that
        cannot be used.
        """
        images, labels = [], []
        for index in indices:
            image, label = self.read_one(int(index))
            images.append(image)
            labels.append(label)
        return images, np.array(labels, np.int32)

    def read_pixels(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Returns pixels, uint8 [k, side, side, 3], and labels, int32 [k]; only where `side` is not
        None.
        """
        raise NotImplementedError(f"{type(self).__name__} has encoded images only")

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal where the same images are read in the same order, without reading one;
        JSON-ready.
        """
        sizes = (
            [] if self.shard_sizes is None else [str(size) for size in self.shard_sizes.tolist()]
        )
        digests = map(_digest, (self.class_names, sizes, self.listing))
        return {"images": self.num_examples} | dict(zip(_COMPARED, digests, strict=True))

    def _checked_label(self, index: int, label: int) -> int:
        if not 0 <= label < self.num_classes:
            raise BadRecord(
                *self.locate(index), f"label {label} is not one of {self.num_classes} classes"
            )
        if self.class_list is not None:
            self.labels_seen.add(label)
        return label


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns in which parts the first of two `Source.identity` differs from the second; empty
    where in none.
    """
    parts = []
    if one.get("images") != other.get("images"):
        parts.append(f"{one.get('images')} images instead of {other.get('images')}")
    parts += [f"other {part}" for part in _COMPARED if one.get(part) != other.get(part)]
    return ", ".join(parts)


def _digest(names: Sequence[str]) -> str:
    found = hashlib.sha256(str(len(names)).encode())
    for start in range(0, len(names), _CHUNK):
        found.update(
            "\0".join(["", *names[start : start + _CHUNK]]).encode("utf-8", "surrogateescape")
        )
    return found.hexdigest()[:16]


def check_directory(file: str) -> None:
    """Raises StorageError if the directory of a file that cannot be read has vanished, as after an
    unmount.

    Skipping bad records would skip every image then. A file that is missing among others, or at a
    URL, is left to the caller.
    """
    if files.is_url(file):
        return
    directory = Path(file).parent
    try:
        with os.scandir(directory) as entries:
            if next(entries, None) is not None:
                return
        reason = "it is empty"
    except OSError as error:
        reason = error.strerror or str(error)
        while not os.path.isdir(directory.parent) and directory.parent != directory:  # noqa: PTH112 - raises nothing
            directory = directory.parent
    raise StorageError(
        f"{directory}: the directory of the images can no longer be read ({reason}). Mount or"
        " restore it, then start again (a training with --resume)"
    )


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str) -> BinaryIO:
    """Opens a file; one that falls out of the cache is closed when the last thread that reads from
    it lets go.
    """
    return files.open_regular(path, buffering=0)


def read_at(path: str, offset: int, length: int, counter: Reads) -> bytes:
    """Reads `length` bytes at `offset`, counted; shorter only at the end of the file."""
    file = _opened(path)
    data = os.pread(file.fileno(), length, offset)
    operations = 1
    while len(data) < length:  # a signal or a network file system may cut a read short
        more = os.pread(file.fileno(), length - len(data), offset + len(data))
        operations += 1
        if not more:
            break
        data += more
    counter.add(len(data), operations)
    return data


def remembered(path: Path, kind: type[Index], make: Callable[[], Index]) -> Index:
    """Returns the index that a cache file holds; without a readable one, makes it again and writes
    it.

    Of the ranks of a host one makes it, and the others wait and read it: a scan of ImageNet is 1.3
    million reads.

    Args:
      path: the file; its directory is made.
      kind: a dataclass of arrays; it may refuse those of another version.
      make: computes what the file should hold; its errors are raised.
    """

    def stored() -> Index | None:
        return files.read_or_none(lambda: load_index(path, kind))

    if (found := stored()) is not None:
        return found
    with files.cache_lock(path):
        if (found := stored()) is not None:
            return found
        made = make()
        with contextlib.suppress(OSError):  # a read-only or full cache costs only the next making
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.atomic_replace(path) as temporary:
                write_index(temporary, made)
    return made


def load_index(path: Path, kind: type[Index]) -> Index:
    """Returns the dataclass of arrays in a file; may raise anything for one that is damaged."""
    with np.load(path) as stored:
        return kind(**stored)


def write_index(path: Path, index: Any) -> None:
    """Writes a dataclass of arrays to a file."""
    with path.open("wb") as file:
        np.savez(file, **vars(index))
