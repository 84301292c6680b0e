"""Reads examples. A bad record is an error, or another example replaces it."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import logging
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import images
from hybrid_imagenet.data.sources.source import BadRecord, Source
from hybrid_imagenet.errors import UserError

_log = logging.getLogger(__name__)


class LoadedExample(NamedTuple):
    """An encoded image that can be used, its label and its decoded header."""

    content: bytes
    label: int
    header: images.DecodedHeader


class LoadedExamples(NamedTuple):
    """Several examples as arrays.

    Attributes:
      contents: Encoded images, bytes [k].
      headers: Kind, height and width (`images.DecodedHeader`), int64 [k, 3].
      labels: int64 [k].
      is_original: Bool [k]; False where the example replaces a bad record.
    """

    contents: npt.NDArray[np.object_]
    headers: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    is_original: npt.NDArray[np.bool]


class BadRecords:
    """Counts the bad records of a source, and fails if there are too many.

    Attributes:
      reasons: Maps each bad example to the reason.
      replaced_examples: (epoch, example) of the bad examples that were replaced. A set, so that an
        example that is read twice counts once.
    """

    def __init__(self, source: Source, policy: str, limit: int) -> None:
        """Starts without bad records.

        Args:
          source: The examples.
          policy: "fail" to raise an error at the first bad record, or "skip".
          limit: With "skip", the number of bad records over all ranks above which an error is
            raised.
        """
        self._source = source
        self._policy = policy
        self._limit = limit
        self.reasons: dict[int, str] = {}
        self.replaced_examples: set[tuple[int, int]] = set()

    def add(self, index: int, error: BadRecord) -> None:
        """Adds a bad record and logs it.

        Raises:
          UserError: Under "fail", or if there are too many.
        """
        if self._policy == "fail":
            raise UserError(f"{error}. Repair it, or set --bad_records=skip.")
        if index not in self.reasons:
            self.reasons[index] = error.reason
            _log.warning("skipped a bad record (%d so far): %s", len(self.reasons), error)
        self._check_limit(index)
        if len(self.reasons) == self._source.num_examples:
            raise UserError(
                f"All {len(self.reasons)} records are bad. Check --data_dir and --dataset. The last"
                f" bad record: {error}"
            )

    def reason_pairs(self) -> list[tuple[int, str]]:
        """Returns (example, reason) of each bad record, which JSON can store."""
        # `dict` copies in one step; reading threads may add records at any time.
        return list(dict(self.reasons).items())

    def merge_from_ranks(self, pairs_by_rank: Iterable[Iterable[tuple[int, str]]]) -> None:
        """Adds the bad records of all ranks, so that none is read or logged again.

        Args:
          pairs_by_rank: The `reason_pairs` of each rank.

        Raises:
          UserError: If there are too many over all ranks.
        """
        for pairs in pairs_by_rank:
            self.reasons |= dict(pairs)
        if self.reasons:
            self._check_limit(max(self.reasons))

    def _check_limit(self, index: int) -> None:
        if len(self.reasons) > self._limit:
            last = BadRecord(*self._source.locate(index), self.reasons[index])
            raise UserError(
                f"There are more than --max_bad_records={self._limit} bad records. Repair them, or"
                f" raise --max_bad_records. The last one: {last}"
            )


class ExampleReader:
    """Reads examples of a source and replaces bad records.

    It is safe to use from several threads.
    """

    def __init__(
        self, source: Source, bad_records: BadRecords, reads: int = 1, callers: int = 1
    ) -> None:
        """Prepares the reading threads.

        Args:
          source: The examples.
          bad_records: The bad records so far, to which new ones are added.
          reads: Number of records that one call of `read` reads at the same time.
          callers: Number of threads that call `read` at the same time.
        """
        self._source = source
        self._bad_records = bad_records
        self._reads = reads
        self._pool = _pool(reads * callers)

    def read(self, examples: npt.NDArray[np.int64]) -> LoadedExamples:
        """Reads examples, int64 [k], and replaces each bad one by the next good one.

        Raises:
          UserError: For a bad record under "fail", or if there are too many.
        """
        count = len(examples)
        loaded = LoadedExamples(
            contents=np.empty(count, object),
            headers=np.empty((count, 3), np.int64),
            labels=np.empty(count, np.int64),
            is_original=np.ones(count, bool),
        )
        outcomes = self._load_in_parallel(examples)
        for position, example in enumerate(examples):
            index = int(example)
            outcome = outcomes[position]
            # The loop ends, because `add` raises an error if all records are bad.
            while isinstance(outcome, BadRecord):
                self._bad_records.add(index, outcome)
                loaded.is_original[position] = False
                index = self._next_index(index)
                outcome = self._try_load(index)
            loaded.contents[position] = outcome.content
            loaded.labels[position] = outcome.label
            loaded.headers[position] = outcome.header
        return loaded

    def check_decodes(self, index: int, side: int) -> None:
        """Decodes the image that `read` returns for an example, and adds it if it is bad.

        Args:
          index: The example.
          side: Pixels of the decoded square.

        Raises:
          UserError: For a bad record under "fail", or if there are too many.
        """
        while index in self._bad_records.reasons:
            index = self._next_index(index)
        try:
            images.check_decodes(self._load(index).content, side)
        except BadRecord as error:
            self._bad_records.add(index, error)
        except ValueError as error:
            self._bad_records.add(index, BadRecord(*self._source.locate(index), str(error)))

    def _next_index(self, index: int) -> int:
        return (index + 1) % self._source.num_examples

    def _load_in_parallel(self, examples: npt.NDArray[np.int64]) -> list[LoadedExample | BadRecord]:
        """Loads examples in up to `reads` threads; returns the outcomes in their order."""
        chunks = np.array_split(examples, max(1, min(self._reads, len(examples))))
        if len(chunks) == 1:
            return self._load_chunk(examples)
        return list(itertools.chain.from_iterable(self._pool.map(self._load_chunk, chunks)))

    def _load_chunk(self, examples: npt.NDArray[np.int64]) -> list[LoadedExample | BadRecord]:
        return [self._try_load(int(index)) for index in examples]

    def _try_load(self, index: int) -> LoadedExample | BadRecord:
        try:
            return self._load(index)
        except BadRecord as error:
            return error

    def _load(self, index: int) -> LoadedExample:
        if index in self._bad_records.reasons:
            raise BadRecord(*self._source.locate(index), self._bad_records.reasons[index])
        content, label = self._source.read_one(index)
        try:
            return LoadedExample(content, label, images.decode_header(content))
        except ValueError as error:
            raise BadRecord(*self._source.locate(index), str(error)) from None


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """Returns the reading threads, which all pipelines share.

    TensorFlow keeps the functions that a pipeline calls, so threads of a single pipeline would
    never end.
    """
    return concurrent.futures.ThreadPoolExecutor(threads, "reads")
