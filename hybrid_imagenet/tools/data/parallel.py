"""Works on a source in several processes, with progress, for the programs that prepare and check
data sets.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hybrid_imagenet.data import DatasetRequest, Source
from hybrid_imagenet.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


_source: Source  # of a worker


def _start(request: DatasetRequest) -> None:
    """Opens the source in a worker, and makes the worker end when its parent is gone, even if that
    was killed.
    """
    global _source
    _source = request.open()
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _call(function: Callable[[Source, Any], Any], task: Any) -> Any:
    return function(_source, task)


def run(
    function: Callable[[Source, Task], Result],
    request: DatasetRequest,
    tasks: Sequence[Task],
    workers: int,
) -> Iterator[tuple[Task, Result]]:
    """Applies a module-level function to (source, task) for all tasks; yields pairs as they are
    done.
    """
    if workers == 1 or len(tasks) <= 1:
        source = request.open()
        for task in tasks:
            yield task, function(source, task)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(tasks)), mp_context=context, initializer=_start, initargs=(request,)
    ) as pool:
        handler = signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # in the workers for good: this process ends them
        futures = {pool.submit(_call, function, task): task for task in tasks}
        signal.signal(signal.SIGINT, handler)
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a worker process died (out of memory?): give fewer --workers and start again"
            ) from None
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Progress:
    """Prints a line for each tenth of the images."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = max(1, total)
        self._done = 0
        self._started = time.monotonic()

    def add(self, count: int) -> None:
        """Counts `count` more images."""
        tenth = 10 * self._done // self._total
        self._done += count
        if 10 * self._done // self._total == tenth:
            return
        rate = self._done / max(1e-9, time.monotonic() - self._started)
        left = (self._total - self._done) / max(rate, 1e-9)
        text = (
            f"{self._title}: {self._done} of {self._total} images, {rate:.0f}/s, {left:.0f} s left"
        )
        print(text, file=sys.stderr, flush=True)
