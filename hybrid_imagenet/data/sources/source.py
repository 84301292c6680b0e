"""Defines `Source`: random access to the encoded images of one split.

A source names the file and offset of each record, so that errors can point at it, and counts what
it reads from storage.
"""

from __future__ import annotations

import abc
import contextlib
import errno
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
from hybrid_imagenet.errors import StorageError, UserError

Index = TypeVar("Index")
# Names are hashed in chunks of this many, so that a million of them are not joined into one string.
_NAMES_PER_CHUNK = 1 << 16
# The keys of `Source.identity` that hold digests. Messages print them, and checkpoints store them.
_DIGEST_KEYS = ("class names", "sizes of shards", "file names")
# Errors of the machine: no memory, too many open files of this process, and of all processes.
_SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
# Linux allows a process 1,024 file descriptors by default. Leave half of them for everything else.
_MAX_OPEN_FILES = 512


class BadRecord(Exception):  # noqa: N818 - it names the record, not the error
    """Reports a record that cannot be used.

    Attributes:
      file: The file that holds the record.
      offset: Position of the record in the file: a byte offset, or the number of its row or image.
      reason: Why it cannot be used.
    """

    def __init__(self, file: str, offset: int, reason: str) -> None:
        super().__init__(f"{file}, offset {offset}: {reason}")
        self.file = file
        self.offset = offset
        self.reason = reason


class ReadCounter:
    """Counts reads from storage by several threads.

    Attributes:
      bytes_read: Bytes read since the source was opened.
      operations: Read operations since the source was opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.operations = 0

    def add(self, bytes_read: int, operations: int = 1) -> None:
        """Adds `operations` reads of `bytes_read` bytes in total."""
        with self._lock:
            self.bytes_read += bytes_read
            self.operations += operations


class Source(abc.ABC):
    """Gives random access to the encoded images of one split.

    A source is safe to use from several threads.

    Attributes:
      num_examples: Number of images in the split.
      num_classes: Number of classes; labels are in [0, num_classes).
      class_names: One name per class, in the order of the labels.
      reuse_decoded_batch: Whether the pipeline may decode one batch and repeat its pixels, so that
        further batches cost nothing.
      side: Height and width in pixels, if all images are squares of one size that `read_pixels`
        returns without decoding; else None.
      notes: One line for each kind of file that is skipped, or that is read with an assumption.
      shard_sizes: Number of examples in each file, int64 [num_files], in the order of
        `file_names`; None if the split is not stored in shards.
      file_names: Names of the files, in order. They are relative to the directory of the dataset,
        so that they are the same on all hosts. Empty for a source without files.
      unverified_class_list: The file that names the classes, if its length can only be compared
        with the labels while they are read; else None.
      labels_seen: The labels that were read so far, only collected with `unverified_class_list`.
      reads: Counts the reads from storage.
    """

    num_examples: int
    num_classes: int
    class_names: tuple[str, ...]
    reuse_decoded_batch: bool = False
    side: int | None = None
    notes: tuple[DatasetNote, ...] = ()
    shard_sizes: npt.NDArray[np.int64] | None = None
    file_names: Sequence[str] = ()
    unverified_class_list: str | None = None

    def __init__(self) -> None:
        self.reads = ReadCounter()
        self.labels_seen: set[int] = set()

    @abc.abstractmethod
    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns the encoded image and the label of one example.

        Raises:
          BadRecord: If the record cannot be read, or its label is not a class.
        """

    @abc.abstractmethod
    def locate(self, index: int) -> tuple[str, int]:
        """Returns the file of an example, and its byte offset or row number in it."""

    def prefetch(self, shards: Sequence[int]) -> None:  # noqa: B027 - optional for subclasses
        """Announces which shards are read now and next, and returns at once.

        A source whose files are copied before they are read can start copying them.
        """

    def read(
        self, indices: Sequence[int] | npt.NDArray[np.int64]
    ) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Reads several examples.

        Returns:
          (images, labels): the encoded images, and the labels as int32 [k].

        Raises:
          BadRecord: At the first record that cannot be used.
        """
        images = []
        labels = []
        for index in indices:
            image, label = self.read_one(int(index))
            images.append(image)
            labels.append(label)
        return images, np.array(labels, np.int32)

    def read_pixels(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Reads several examples as pixels; only for sources whose `side` is not None.

        Returns:
          (pixels, labels): uint8 [k, side, side, 3] and int32 [k].
        """
        raise NotImplementedError(f"{type(self).__name__} has encoded images only")

    def stored_labels(self) -> npt.NDArray[np.int64] | None:
        """Returns the labels of all examples, int64 [num_examples], without reading an image.

        Labels of records that cannot be used are negative. None if each label is stored together
        with its image, so that all data would have to be read.
        """
        return None

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Returns counts and digests that are equal for equal data in equal order.

        They are JSON-ready, and computed from names and sizes without reading an image.
        """
        shard_sizes: list[str] = []
        if self.shard_sizes is not None:
            shard_sizes = [str(size) for size in self.shard_sizes.tolist()]
        identity: dict[str, Any] = {"images": self.num_examples}
        names = (self.class_names, shard_sizes, self.file_names)
        for key, values in zip(_DIGEST_KEYS, names, strict=True):
            identity[key] = _digest(values)
        return identity

    def _validate_label(self, index: int, label: int) -> int:
        """Returns the label of an example; raises BadRecord if it is not a class."""
        if not 0 <= label < self.num_classes:
            file, offset = self.locate(index)
            reason = f"label {label} is not one of {self.num_classes} classes"
            raise BadRecord(file, offset, reason)
        if self.unverified_class_list is not None:
            self.labels_seen.add(label)
        return label


def identity_difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Returns how one `Source.identity` differs from another, or "" if they are equal."""
    differences = []
    if actual.get("images") != expected.get("images"):
        differences.append(f"{actual.get('images')} images instead of {expected.get('images')}")
    for key in _DIGEST_KEYS:
        if actual.get(key) != expected.get(key):
            differences.append(f"other {key}")
    return ", ".join(differences)


def _digest(names: Sequence[str]) -> str:
    digest = hashlib.sha256(str(len(names)).encode())
    for start in range(0, len(names), _NAMES_PER_CHUNK):
        chunk = names[start : start + _NAMES_PER_CHUNK]
        digest.update("\0".join(["", *chunk]).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def raise_if_file_may_be_intact(file: str, error: OSError) -> None:
    """Raises an error if the reason why a file cannot be read is not the file itself.

    This is so if the directory of the file has vanished, which happens when it is unmounted, or if
    the machine is short of memory or of open files. Without this check, `--bad_records=skip` would
    skip intact images. The caller handles a file that is missing among others, or at a URL.

    Args:
      file: The file.
      error: Why it cannot be read.

    Raises:
      UserError: If the machine is short of memory or of open files.
      StorageError: If the directory has vanished.
    """
    if error.errno in _SHORTAGES:
        raise UserError(
            f"{file} cannot be read ({error.strerror}). The file may be intact. Free memory, or"
            " raise the limit of open files (ulimit -n), and start again."
        )
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
        # Name the uppermost directory that is missing: it is the one to mount. os.path.isdir
        # returns False where Path.is_dir would raise.
        while not os.path.isdir(directory.parent) and directory.parent != directory:  # noqa: PTH112
            directory = directory.parent
    raise StorageError(
        f"{directory}: the directory of the images can no longer be read ({reason}). Mount or"
        " restore it, then start again (a training with --resume)"
    )


@functools.lru_cache(maxsize=_MAX_OPEN_FILES)
def _open_cached(path: str) -> BinaryIO:
    """Opens a file, or returns it if it is still open.

    A file that drops out of the cache is closed by the garbage collector, after the last thread
    that reads from it has released it.
    """
    return files.open_regular(path, buffering=0)


def read_at(path: str, offset: int, length: int, counter: ReadCounter) -> bytes:
    """Reads and counts `length` bytes at `offset`, or fewer at the end of the file."""
    file = _open_cached(path)
    data = os.pread(file.fileno(), length, offset)
    operations = 1
    # A signal or a network file system may cut a read short.
    while len(data) < length:
        more = os.pread(file.fileno(), length - len(data), offset + len(data))
        operations += 1
        if not more:
            break
        data += more
    counter.add(len(data), operations)
    return data


def load_or_build_index(path: Path, index_type: type[Index], build: Callable[[], Index]) -> Index:
    """Loads an index from its cache file, or builds it and writes the file.

    One rank per host builds the index, and the others wait for the file, because a scan of ImageNet
    takes 1.3 million reads.

    Args:
      path: The cache file. Its directory is created.
      index_type: A dataclass of arrays. It may raise an exception for arrays of another version.
      build: Returns the index. Its errors are passed on.
    """
    index = _load_if_valid(path, index_type)
    if index is not None:
        return index
    with files.cache_lock(path):
        # Another rank may have written the file while this one waited.
        index = _load_if_valid(path, index_type)
        if index is not None:
            return index
        index = build()
        # If the cache is full or read-only, the next start has to build the index again. That is
        # no reason to fail.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.atomic_replace(path) as temporary:
                write_index(temporary, index)
    return index


def _load_if_valid(path: Path, index_type: type[Index]) -> Index | None:
    return files.read_or_none(lambda: load_index(path, index_type))


def load_index(path: Path, index_type: type[Index]) -> Index:
    """Loads a dataclass of arrays from a file; a damaged file may raise any exception."""
    with np.load(path) as arrays:
        return index_type(**arrays)


def write_index(path: Path, index: Any) -> None:
    """Writes a dataclass of arrays to a file."""
    with path.open("wb") as file:
        np.savez(file, **vars(index))
