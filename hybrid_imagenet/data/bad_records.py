"""What is done about records that cannot be used."""

from __future__ import annotations

import logging

from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError

_log = logging.getLogger(__name__)


class BadRecords:
    """The records that turned out bad: failing at the first, or counted, logged and replaced.

    Attributes:
      known: the reason by example.
    """

    def __init__(self, source: Source, policy: str, limit: int) -> None:
        """Starts with none; `policy` is "fail" or "skip", which fails above `limit` records."""
        self._source = source
        self._policy = policy
        self._limit = limit
        self.known: dict[int, str] = {}

    def add(self, index: int, error: BadRecord) -> None:
        """Notes a bad record; raises UserError under "fail", or when there are too many."""
        if self._policy == "fail":
            raise UserError(f"{error}; mend it, or give --bad_records=skip")
        if index not in self.known:
            self.known[index] = error.reason
            _log.warning("skipped a bad record (%d so far): %s", len(self.known), error)
        if len(self.known) > self._limit:
            raise UserError(f"more than --max_bad_records={self._limit} bad records; the last: {error}")
        if len(self.known) == self._source.num_examples:
            raise UserError(f"every record is bad; the last: {error}")
