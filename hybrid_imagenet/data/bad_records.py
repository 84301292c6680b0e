"""Reads examples that can be used: fails at a bad one, or logs and counts it and takes its neighbor
in its place.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data import images
from hybrid_imagenet.data.sources.source import BadRecord, Source
from hybrid_imagenet.errors import UserError

_log = logging.getLogger(__name__)
Usable = tuple[bytes, int, tuple[int, int, int]]  # content, label, and what `images.probe` finds
Read = tuple[
    npt.NDArray[np.object_], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool]
]


class BadRecords:
    """Keeps the records of a source that turned out bad.

    Attributes:
      known: the reason by example.
      replaced: (epoch, example) of those in whose place another was read. Reading an example twice
        adds nothing.
    """

    def __init__(self, source: Source, policy: str, limit: int) -> None:
        """Starts with none; `policy` is "fail" or "skip", which fails above `limit` records of all
        ranks.
        """
        self._source = source
        self._policy = policy
        self._limit = limit
        self.known: dict[int, str] = {}
        self.replaced: set[tuple[int, int]] = set()

    def add(self, index: int, error: BadRecord) -> None:
        """Notes a bad record; raises UserError under "fail", or when there are too many."""
        if self._policy == "fail":
            raise UserError(f"{error}. Repair it, or set --bad_records=skip")
        if index not in self.known:
            self.known[index] = error.reason
            _log.warning("skipped a bad record (%d so far): %s", len(self.known), error)
        self._check_limit(index)
        if len(self.known) == self._source.num_examples:
            raise UserError(f"every record is bad; the last: {error}")

    def pairs(self) -> list[tuple[int, str]]:
        """Returns the known bad records, to be gathered from all ranks as JSON: (example, reason)
        each.
        """
        return list(dict(self.known).items())  # a copy in one go: reading threads add to it

    def share(self, ranks: Iterable[Iterable[tuple[int, str]]]) -> None:
        """Takes what each rank knows, so that a record counts once and none is read or told again.

        Args:
          ranks: the `pairs` of each.

        Raises:
          UserError: when there are too many over all ranks.
        """
        for pairs in ranks:
            self.known |= dict(pairs)
        if self.known:
            self._check_limit(max(self.known))

    def _check_limit(self, index: int) -> None:
        if len(self.known) > self._limit:
            last = BadRecord(*self._source.locate(index), self.known[index])
            raise UserError(
                f"more than --max_bad_records={self._limit} bad records; the last: {last}"
            )


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads that all pipelines share: TensorFlow keeps what a pipeline calls, so its own
    would stay.
    """
    return concurrent.futures.ThreadPoolExecutor(threads, "reads")


class UsableExamples:
    """Wraps a source and leaves out its bad records; safe to use from several threads."""

    def __init__(self, source: Source, bad: BadRecords, reads: int = 1, callers: int = 1) -> None:
        """Takes the records that are known to be bad, and adds those that are found.

        Args:
          source: of the records.
          bad: those that are bad.
          reads: records that one call of `read` reads at the same time.
          callers: threads that call it.
        """
        self._source = source
        self._bad = bad
        self._reads = reads
        self._pool = _pool(reads * callers)

    def read(self, examples: npt.NDArray[np.int64]) -> Read:
        """Reads `k` examples.

        Returns:
          (contents, probed, labels, own): encoded images, bytes [k]; kind, height and width of
          each, int64 [k, 3]; int64 [k]; and whether each is the example that was asked for, bool
          [k], or one that took its place.

        Raises:
          UserError: for a bad record under "fail", or too many of them.
        """
        count = len(examples)
        contents = np.empty(count, object)
        probed = np.empty((count, 3), np.int64)
        labels = np.empty(count, np.int64)
        own = np.ones(count, bool)
        read = self._read_together(examples)
        for place, index in enumerate(examples):
            attempt, outcome = int(index), read[place]
            while isinstance(outcome, BadRecord):  # `bad.add` ends this when there are too many
                self._bad.add(attempt, outcome)
                own[place] = False
                attempt = self._neighbor(attempt)
                outcome = self._outcome(attempt)
            contents[place], labels[place], probed[place] = outcome
        return contents, probed, labels, own

    def check_decodes(self, index: int, side: int) -> None:
        """Decodes what `read` gives for an example, and notes it if it is bad; raises UserError as
        `read` does.
        """
        while index in self._bad.known:
            index = self._neighbor(index)
        try:
            images.check_decodes(self._one(index)[0], side)
        except BadRecord as error:
            self._bad.add(index, error)
        except ValueError as error:
            self._bad.add(index, BadRecord(*self._source.locate(index), str(error)))

    def _neighbor(self, index: int) -> int:
        return (index + 1) % self._source.num_examples

    def _read_together(self, examples: npt.NDArray[np.int64]) -> list[Usable | BadRecord]:
        """Returns the outcome for each example, in their order, from as many threads as parts."""
        parts = np.array_split(examples, max(1, min(self._reads, len(examples))))
        if len(parts) == 1:
            return [self._outcome(int(index)) for index in examples]
        done = self._pool.map(lambda part: [self._outcome(int(index)) for index in part], parts)
        return [outcome for part in done for outcome in part]

    def _outcome(self, index: int) -> Usable | BadRecord:
        try:
            return self._one(index)
        except BadRecord as error:
            return error

    def _one(self, index: int) -> Usable:
        if index in self._bad.known:
            raise BadRecord(*self._source.locate(index), self._bad.known[index])
        content, label = self._source.read_one(index)
        try:
            return content, label, images.probe(content)
        except ValueError as error:
            raise BadRecord(*self._source.locate(index), str(error)) from None
