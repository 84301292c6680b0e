"""Defines a source of images: random access, a name for each record's place, and counters of what it read."""

from __future__ import annotations

import abc
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data.identity import identity
from hybrid_imagenet.data.listing import Note

_OPEN_FILES = 512  # below the usual limit of 1,024 descriptors per process


class BadRecord(Exception):  # noqa: N818 - it names the record, not the error
    """A record that cannot be used: its file, its place there (bytes, or a row number) and the reason."""

    def __init__(self, file: str, offset: int, reason: str) -> None:
        """Keeps the three parts; the message is one line of them."""
        super().__init__(f"{file}, offset {offset}: {reason}")
        self.file = file
        self.offset = offset
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Loss:
    """Records that a file has lost: they can no longer be found in it, or are missing.

    Attributes:
      file: where they were.
      offset: the first byte that makes no sense.
      reason: why it makes none, and where readable records go on.
      count: records that are lost.
      exact: whether that is known, from a manifest; else each damaged place counts as one record.
    """

    file: str
    offset: int
    reason: str
    count: int
    exact: bool

    def __str__(self) -> str:
        """Returns one line."""
        return (
            f"{self.file}, offset {self.offset}: {self.reason} ({'' if self.exact else 'at least '}{self.count} lost)"
        )


@dataclasses.dataclass(frozen=True)
class IoStatistics:
    """Counts what has been read from storage since the source was opened."""

    bytes_read: int = 0
    operations: int = 0
    seconds: float = 0.0  # time inside read calls, summed over threads

    def __sub__(self, earlier: IoStatistics) -> IoStatistics:
        """Returns what was read since `earlier`."""
        return IoStatistics(
            self.bytes_read - earlier.bytes_read, self.operations - earlier.operations, self.seconds - earlier.seconds
        )


class IoCounter:
    """Adds up reads from several threads."""

    def __init__(self) -> None:
        """Starts at zero."""
        self._lock = threading.Lock()
        self._total = IoStatistics()

    def add(self, bytes_read: int, operations: int, seconds: float) -> None:
        """Counts some read operations."""
        with self._lock:
            total = self._total
            self._total = IoStatistics(
                total.bytes_read + bytes_read, total.operations + operations, total.seconds + seconds
            )

    def total(self) -> IoStatistics:
        """Returns the sums so far."""
        return self._total


class Source(abc.ABC):
    """Gives random access to the encoded images of one split, safe to use from several threads.

    Attributes:
      num_examples: images in the split.
      num_classes: labels lie in [0, num_classes).
      class_names: one name per class, in the order of the labels.
      ready: the pipeline may decode one batch and repeat its pixels, so that batches cost nothing.
      side: all images are squares of so many pixels, which `read_pixels` gives without decoding; None where not.
      losses: what damaged files have lost; `num_examples` does not count it.
      notes: what is not read, or read on an assumption, one line for each kind.
      shard_sizes: examples in each file, int64 [s], in the order of their numbers; None where files do not matter.
      listing: names of the files in their order, relative to the directory of the data set, so that they are the same
        on all hosts; empty where there are none.
    """

    num_examples: int
    num_classes: int
    class_names: tuple[str, ...]
    ready: bool = False
    side: int | None = None
    losses: tuple[Loss, ...] = ()
    notes: tuple[Note, ...] = ()
    shard_sizes: npt.NDArray[np.int64] | None = None
    listing: Sequence[str] = ()

    def __init__(self) -> None:
        """Starts the counters."""
        self.io = IoCounter()

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

    def read(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Returns encoded images and labels, int32 [k]; raises BadRecord at the first record that cannot be used."""
        images, labels = [], []
        for index in indices:
            image, label = self.read_one(int(index))
            images.append(image)
            labels.append(label)
        return images, np.array(labels, np.int32)

    def read_pixels(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Returns pixels, uint8 [k, side, side, 3], and labels, int32 [k]; only where `side` is not None."""
        raise NotImplementedError(f"{type(self).__name__} has encoded images only")

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What tells these images from others, without reading one; see `data.identity`."""
        return identity(self.num_examples, self.class_names, self.shard_sizes, self.listing)

    @property
    def lost(self) -> int:
        """Records that damaged files have lost."""
        return sum(loss.count for loss in self.losses)

    def io_statistics(self) -> IoStatistics:
        """Returns bytes and operations read so far, and the time they took."""
        return self.io.total()

    def _checked_label(self, index: int, label: int) -> int:
        if not 0 <= label < self.num_classes:
            raise BadRecord(*self.locate(index), f"label {label} is not one of {self.num_classes} classes")
        return label


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str) -> BinaryIO:
    """Opens a file; one that falls out of the cache is closed when the last thread that reads from it lets go."""
    return Path(path).open("rb", buffering=0)


def read_at(path: str, offset: int, length: int, counter: IoCounter) -> bytes:
    """Reads `length` bytes at `offset`, counted; shorter only at the end of the file."""
    started = time.perf_counter()
    file = _opened(path)
    data = os.pread(file.fileno(), length, offset)
    operations = 1
    while len(data) < length:  # a signal or a network file system may cut a read short
        more = os.pread(file.fileno(), length - len(data), offset + len(data))
        operations += 1
        if not more:
            break
        data += more
    counter.add(len(data), operations, time.perf_counter() - started)
    return data
