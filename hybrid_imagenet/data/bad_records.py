"""Fails at records that cannot be used, or counts, logs and replaces them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError

_log = logging.getLogger(__name__)


class BadRecords:
    """Keeps the records of a source that turned out bad.

    Attributes:
      known: the reason by example.
    """

    def __init__(self, source: Source, policy: str, limit: int) -> None:
        """Starts with none; `policy` is "fail" or "skip", which fails above `limit` records of all ranks."""
        self._source = source
        self._policy = policy
        self._limit = limit
        self.known: dict[int, str] = {}

    @property
    def count(self) -> int:
        """Records that are known to be bad, and those that damaged files have lost; each once."""
        return len(self.known) + self._source.lost

    def add(self, index: int, error: BadRecord) -> None:
        """Notes a bad record; raises UserError under "fail", or when there are too many."""
        if self._policy == "fail":
            raise UserError(f"{error}; mend it, or give --bad_records=skip")
        if index not in self.known:
            self.known[index] = error.reason
            _log.warning("skipped a bad record (%d so far): %s", self.count, error)
        self._check_limit(index)
        if len(self.known) == self._source.num_examples:
            raise UserError(f"every record is bad; the last: {error}")

    def pairs(self) -> list[tuple[int, str]]:
        """Returns the known bad records, to be gathered from all ranks as JSON: (example, reason) each."""
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
        if self.count > self._limit:
            last = BadRecord(*self._source.locate(index), self.known[index])
            raise UserError(f"more than --max_bad_records={self._limit} bad records; the last: {last}")


def check_losses(source: Source, limit: int) -> None:
    """Raises UserError if damaged files have lost more records than `limit`."""
    if source.lost > limit:
        raise UserError(f"more than --max_bad_records={limit} bad records; the last: {source.losses[-1]}")
