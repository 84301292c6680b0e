"""Selects some of the examples of another source, under numbers of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data.listing import Note
from hybrid_imagenet.data.sources.base import IoStatistics, Source


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
        notes: tuple[Note, ...] = (),
    ) -> None:
        """Reads nothing yet."""
        super().__init__()
        self._source, self._indices = source, indices
        self.num_examples = len(indices)
        self.num_classes, self.class_names = source.num_classes, source.class_names
        self.ready, self.side = source.ready, source.side
        self.notes, self.listing = notes, source.listing
        if source.shard_sizes is not None and (np.diff(indices) > 0).all():
            self.shard_sizes = np.diff(np.searchsorted(indices, np.cumsum(source.shard_sizes)), prepend=0)

    def read_one(self, index: int) -> tuple[bytes, int]:
        return self._source.read_one(int(self._indices[index]))

    def read_pixels(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        return self._source.read_pixels(self._indices[indices])

    def prefetch(self, shards: Sequence[int]) -> None:
        self._source.prefetch(shards)

    def locate(self, index: int) -> tuple[str, int]:
        return self._source.locate(int(self._indices[index]))

    def io_statistics(self) -> IoStatistics:
        return self._source.io_statistics()
