"""Runs tasks on a source in several processes, and prints progress."""

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

from hybrid_imagenet.data.datasets import DatasetRequest
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

# The source that a worker process has opened for its tasks.
_worker_source: Source


def run(
    function: Callable[[Source, Task], Result],
    request: DatasetRequest,
    tasks: Sequence[Task],
    workers: int,
) -> Iterator[tuple[Task, Result]]:
    """Calls a function for all tasks, in several processes.

    Args:
      function: Is called with a source and a task. It is pickled, so it must be defined at the top
        level of a module.
      request: Names the source, which each process opens by itself.
      tasks: The second arguments of the calls, which are pickled too.
      workers: Number of processes; with 1 the tasks run in this process.

    Yields:
      (task, result) pairs, as they are done.

    Raises:
      UserError: If a process dies, for example because memory runs out.
    """
    if workers == 1 or len(tasks) <= 1:
        source = request.open()
        for task in tasks:
            yield task, function(source, task)
        return
    # Spawned processes do not inherit the threads and locks of this one, as forked ones would.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(tasks)),
        mp_context=context,
        initializer=_initialize_worker,
        initargs=(request,),
    ) as pool:
        # The workers start while tasks are submitted, and inherit that Ctrl-C is ignored. This
        # process ends them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = {pool.submit(_run_task, function, task): task for task in tasks}
        signal.signal(signal.SIGINT, handler)
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "A worker process died, maybe because memory ran out. Set fewer --workers and start"
                " again."
            ) from None
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _initialize_worker(request: DatasetRequest) -> None:
    """Opens the source in a worker, and ties the worker's life to its parent's.

    A parent that is killed cannot end its workers, so each watches for that.
    """
    global _worker_source
    _worker_source = request.open()
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_task(function: Callable[[Source, Any], Any], task: Any) -> Any:
    return function(_worker_source, task)


class ProgressPrinter:
    """Prints a line to stderr after each tenth of the images.

    Args:
      title: What is worked on, at the beginning of each line.
      total: Number of images.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = max(1, total)
        self._done = 0
        self._start_time = time.monotonic()

    def add(self, count: int) -> None:
        """Adds `count` images to those that are done."""
        previous_tenths = 10 * self._done // self._total
        self._done += count
        if 10 * self._done // self._total == previous_tenths:
            return
        images_per_second = self._done / max(1e-9, time.monotonic() - self._start_time)
        remaining_seconds = (self._total - self._done) / max(images_per_second, 1e-9)
        print(
            f"{self._title}: {self._done} of {self._total} images, {images_per_second:.0f}/s,"
            f" {remaining_seconds:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
