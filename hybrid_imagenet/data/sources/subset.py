"""A source that is a subset of the examples of another one."""

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
      source: The source of all examples.
      indices: The examples of the subset, in order, int64 [k].
      notes: The notes to report. If there are several subsets of one source, only one of them gets
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
