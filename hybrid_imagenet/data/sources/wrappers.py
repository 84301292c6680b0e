"""Sources made of another: some of its examples under numbers of their own, and all of them kept in
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources.source import Source


class Subset(Source):
    """The examples of a source that `indices` names (int64 [k]), in that order.

    Args:
      source: all examples.
      indices: those that are taken.
      notes: those of the source, if they are told here; of several subsets only one tells them.
    """

    def __init__(
        self,
        source: Source,
        indices: npt.NDArray[np.int64],
        notes: tuple[DatasetNote, ...] = (),
    ) -> None:
        super().__init__()
        self._source, self._indices = source, indices
        self.reads = source.reads
        self.num_examples = len(indices)
        self.num_classes, self.class_names = source.num_classes, source.class_names
        self.ready, self.side = source.ready, source.side
        self.notes, self.listing = (
            notes,
            [*source.listing, hashlib.sha256(indices.tobytes()).hexdigest()],
        )
        self.class_list, self.labels_seen = source.class_list, source.labels_seen
        if source.shard_sizes is not None and (np.diff(indices) > 0).all():
            self.shard_sizes = np.diff(
                np.searchsorted(indices, np.cumsum(source.shard_sizes)), prepend=0
            )

    def read_one(self, index: int) -> tuple[bytes, int]:
        return self._source.read_one(int(self._indices[index]))

    def read_pixels(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        return self._source.read_pixels(self._indices[indices])

    def prefetch(self, shards: Sequence[int]) -> None:
        self._source.prefetch(shards)

    def locate(self, index: int) -> tuple[str, int]:
        return self._source.locate(int(self._indices[index]))


class CachedSource(Source):
    """Wraps a source so that its images are read from storage once.

    What has been stored stays: in a shuffled order every image is as likely to be next as any
    other, so nothing is gained by replacing one with another. When the bound is reached, the rest
    is read from storage as before.

    Args:
      source: what is read.
      limit: bytes of images that are stored in all, at most.
    """

    def __init__(self, source: Source, limit: int) -> None:
        super().__init__()
        self._source = source
        self._limit = limit
        self._memory: dict[int, tuple[bytes, int]] = {}
        self._stored = 0
        self.reads = source.reads
        self.num_examples, self.num_classes = source.num_examples, source.num_classes
        self.class_names, self.notes = source.class_names, source.notes
        self.shard_sizes, self.listing = source.shard_sizes, source.listing
        self.class_list, self.labels_seen = source.class_list, source.labels_seen

    def locate(self, index: int) -> tuple[str, int]:
        return self._source.locate(index)

    def prefetch(self, shards: Sequence[int]) -> None:
        self._source.prefetch(shards)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads from the cache if the image is there, else from the source, and remembers it while
        there is room.
        """
        entry = self._memory.get(index)
        if entry is not None:
            return entry
        entry = content, _ = self._source.read_one(index)
        if (
            self._stored + len(content) <= self._limit
            and self._memory.setdefault(index, entry) is entry
        ):
            self._stored += len(content)  # once, where several threads read the same image
        return entry
