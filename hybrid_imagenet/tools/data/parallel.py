"""Works on a source in several processes, with progress, for the programs that prepare and check data sets."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

from hybrid_imagenet.data import Request, Source
from hybrid_imagenet.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


_source: Source | None = None


def _start(request: Request) -> None:
    """Opens the source in a worker, and makes the worker end when its parent is gone, even if that was killed."""
    global _source
    _source = request.open()
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _call(function: Callable[[Source, Any], Any], task: Any) -> Any:
    if _source is None:
        raise RuntimeError("the worker has no source")
    return function(_source, task)


def run(
    function: Callable[[Source, Task], Result], request: Request, tasks: Sequence[Task], workers: int
) -> Iterator[tuple[Task, Result]]:
    """Applies a module-level function to (source, task) for all tasks; yields pairs as they are done."""
    if workers == 1 or len(tasks) <= 1:
        source = request.open()
        for task in tasks:
            yield task, function(source, task)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(tasks)), mp_context=context, initializer=_start, initargs=(request,)
    ) as pool:
        with _interrupts_blocked():  # in the workers for good: this process ends them
            futures = {pool.submit(_call, function, task): task for task in tasks}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError("a worker process died (out of memory?): give fewer --workers and start again") from None
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks Ctrl-C, also in processes that are started inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Progress:
    """A bar on a terminal, a line per tenth elsewhere."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self._title = title
        self._total = max(1, total)
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._done = 0
        self._shown = -1
        self._started = time.monotonic()

    def add(self, count: int) -> None:
        """Counts `count` more images."""
        if not count:
            return
        self._done += count
        tenth = 10 * self._done // self._total
        if not self._terminal and tenth == self._shown:
            return
        self._shown = tenth
        rate = self._done / max(1e-9, time.monotonic() - self._started)
        left = (self._total - self._done) / max(rate, 1e-9)
        text = f"{self._title}: {self._done} of {self._total} images, {rate:.0f}/s, {left:.0f} s left"
        if self._terminal:
            filled = 30 * self._done // self._total
            end = "\n" if self._done >= self._total else ""
            self._stream.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text}\x1b[K{end}")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
