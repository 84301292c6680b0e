"""Makes requests to a server until they succeed, cannot succeed, or the server has failed for too long."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hybrid_imagenet.errors import StorageError, without_secrets

T = TypeVar("T")
_log = logging.getLogger(__name__)
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before the next try; the last one from then on
_SHORTEST = 10.0  # seconds that a request may always take


class Retries:
    """Makes requests again that fail; safe to use from several threads.

    Args:
      timeout: seconds after a first failure without any success in which a request is made again.
    """

    def __init__(self, timeout: float) -> None:
        """Nothing has failed yet."""
        self._timeout = timeout
        self._failing_since: float | None = None  # of all threads

    def __call__(self, request: Callable[[], T], where: str, patience: float = 1.0) -> T:
        """Returns what a request returns.

        Args:
          request: is called in a thread of its own, once for each try. A try that takes longer than `timeout` has
            failed; what it does afterwards is ignored.
          where: what is asked for, for messages.
          patience: factor on the time that a try may take.

        Raises:
          FileNotFoundError: if there is no such file, or no access to it.
          StorageError: if it has failed for `timeout` seconds, and twice at least.
        """
        first: float | None = None
        for tries in itertools.count():
            try:
                result = _within(max(self._timeout, _SHORTEST) * patience, request)
            except Exception as error:
                if _permanent(error):
                    raise FileNotFoundError(where) from None
                first = first or time.monotonic()
                self._wait(where, error, first, tries)
            else:
                self._failing_since = None
                return result
        raise AssertionError

    def _wait(self, where: str, error: Exception, first: float, tries: int) -> None:
        """Waits before the next try; raises StorageError when there is to be none."""
        now = time.monotonic()
        reason = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        since = self._failing_since
        if since is None:
            since = self._failing_since = first
            _log.warning(without_secrets(f"{where}: {reason}; trying again for {self._timeout:g} seconds"))
        # What another thread has waited for in vain counts: the next one in its place must not wait as long again.
        left = self._timeout - (now - min(first, since))
        if left <= 0 and tries:
            raise StorageError(
                f"{where}: has failed for --storage_timeout={self._timeout:g} seconds ({reason}); start again with "
                "--resume when it answers"
            )
        time.sleep(max(0.0, min(_PAUSES[min(tries, len(_PAUSES) - 1)], left)))


def _within(seconds: float, request: Callable[[], T]) -> T:
    """Returns what a request returns; raises TimeoutError when it takes longer, and leaves it to itself."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(request())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="request", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise  # the request's own
        raise TimeoutError(f"not done after {seconds:g} seconds") from None


def _permanent(error: Exception) -> bool:
    """Returns whether a request cannot succeed: there is no such file, or it is not for us."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if isinstance(status, int) and status:
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(cause, (FileNotFoundError, PermissionError))
