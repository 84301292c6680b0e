"""Makes all ranks follow a request to stop or to save after the same step."""

from __future__ import annotations

import time

from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.resilience.stop_signals import REQUESTS

# To stop and to save.
NUM_REQUESTS = 2


class StepRequests:
    """Follows the requests of signals and of the clock, on all ranks after the same step.

    A request is known to one host only. Each rank counts its requests, each update sums the counts
    over ranks (`RequestSum`), and all ranks read the sum after the update. Counts only grow, so a
    rank that reads the same sum twice, as it does after a micro-batch without an update, follows
    each request once.

    Attributes:
      stop: Whether a rank had asked to stop before the last update.
      save: Whether a rank had asked to save before the last update, and the ranks have not saved
        since.
    """

    def __init__(self, request_sum: RequestSum | None, save_every_seconds: float | None = None):
        """Starts without requests.

        Args:
          request_sum: Sums the requests in each update; None for a single process.
          save_every_seconds: Asks for checkpoints by time; on one rank only.
        """
        self.stop = False
        self.save = False
        self._request_sum = request_sum
        if request_sum is not None:
            request_sum.reset()
        self._save_every_seconds = save_every_seconds
        self._last_save = time.monotonic()
        self._own_counts = (0, 0)
        self._followed_saves = 0

    def post(self) -> None:
        """Counts the requests of this rank; call it before each step."""
        _, saves = self._own_counts
        if self._save_every_seconds is not None:
            now = time.monotonic()
            if now - self._last_save >= self._save_every_seconds:
                self._last_save = now
                saves += 1
        stops = int(REQUESTS.stop)
        if (stops, saves) != self._own_counts:
            self._own_counts = (stops, saves)
            if self._request_sum is not None:
                self._request_sum.set_own(self._own_counts)

    def follow(self) -> None:
        """Updates `stop` and `save`; call it after each step."""
        counts = self._own_counts if self._request_sum is None else self._request_sum.read()
        stops, saves = (int(count) for count in counts)
        self.stop = stops > 0
        self.save = saves > self._followed_saves
        self._followed_saves = saves
