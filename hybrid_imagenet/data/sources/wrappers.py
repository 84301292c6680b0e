"""Sources that wrap another one: a subset of its examples, and a cache in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources.source import Source


class Subset(Source):
    """Gives access to some examples of another source, numbered from 0.

    Args:
      source: the source of all examples.
      indices: the examples of the subset, in order, int64 [k].
      notes: the notes to report. If there are several subsets of one source, only one of them gets
        its notes, so that they are not reported twice.
    """

    def __init__(
        self,
        source: Source,
        indices: npt.NDArray[np.int64],
        notes: tuple[DatasetNote, ...] = (),
    ) -> None:
        super().__init__()
        self._source = source
        self._indices = indices
        self.reads = source.reads
        self.num_examples = len(indices)
        self.num_classes = source.num_classes
        self.class_names = source.class_names
        self.reuse_decoded_batch = source.reuse_decoded_batch
        self.side = source.side
        self.notes = notes
        # The digest of the indices is part of the identity: two subsets of the same files differ.
        self.file_names = [*source.file_names, hashlib.sha256(indices.tobytes()).hexdigest()]
        self.unverified_class_list = source.unverified_class_list
        self.labels_seen = source.labels_seen
        # Each shard keeps its examples together only if their order has not changed.
        is_ascending = bool((np.diff(indices) > 0).all())
        if source.shard_sizes is not None and is_ascending:
            ends = np.searchsorted(indices, np.cumsum(source.shard_sizes))
            self.shard_sizes = np.diff(ends, prepend=0)

    def read_one(self, index: int) -> tuple[bytes, int]:
        return self._source.read_one(int(self._indices[index]))

    def read_pixels(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        return self._source.read_pixels(self._indices[indices])

    def stored_labels(self) -> npt.NDArray[np.int64] | None:
        labels = self._source.stored_labels()
        return None if labels is None else labels[self._indices]

    def prefetch(self, shards: Sequence[int]) -> None:
        self._source.prefetch(shards)

    def locate(self, index: int) -> tuple[str, int]:
        return self._source.locate(int(self._indices[index]))


class CachedSource(Source):
    """Keeps the encoded images of another source in memory, so that each is read once.

    Images that are in memory stay there. In a shuffled order every image is equally likely to be
    the next, so replacing one with another would gain nothing. Once the limit is reached, the
    remaining images are read from storage each time.

    Args:
      source: the source to read from.
      max_bytes: maximum total size of the images in memory.
    """

    def __init__(self, source: Source, max_bytes: int) -> None:
        super().__init__()
        self._source = source
        self._max_bytes = max_bytes
        self._examples: dict[int, tuple[bytes, int]] = {}
        self._cached_bytes = 0
        self.reads = source.reads
        self.num_examples = source.num_examples
        self.num_classes = source.num_classes
        self.class_names = source.class_names
        self.notes = source.notes
        self.shard_sizes = source.shard_sizes
        self.file_names = source.file_names
        self.unverified_class_list = source.unverified_class_list
        self.labels_seen = source.labels_seen

    def stored_labels(self) -> npt.NDArray[np.int64] | None:
        return self._source.stored_labels()

    def locate(self, index: int) -> tuple[str, int]:
        return self._source.locate(index)

    def prefetch(self, shards: Sequence[int]) -> None:
        self._source.prefetch(shards)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Returns an example from memory, or reads it and keeps it while there is room."""
        cached = self._examples.get(index)
        if cached is not None:
            return cached
        example = self._source.read_one(index)
        size = len(example[0])
        if self._cached_bytes + size > self._max_bytes:
            return example
        # If several threads read the same image, count only the one that was stored.
        if self._examples.setdefault(index, example) is example:
            self._cached_bytes += size
        return example
