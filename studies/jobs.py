"""Runs several cells at once on one host and divides its GPUs and cores among them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import queue
import threading
from collections.abc import Collection, Generator, Mapping, Sequence

from hybrid_imagenet.cluster import gpus
from studies import running
from studies.running import Place
from studies.trial_runs import Cell, Result


@dataclasses.dataclass(frozen=True)
class Ended:
    """A cell that has ended.

    Attributes:
      number: Its index among the cells.
      result: The result of the run.
      ran: Whether it was run now; False if its result is from an earlier start.
    """

    number: int
    result: Result
    ran: bool


def places(
    jobs: int, ranks: int, cores: Collection[int], gpu_count: int, environ: Mapping[str, str]
) -> list[Place]:
    """Divides the cores and GPUs of a host among jobs that run at the same time.

    A single job gets everything. Otherwise each job gets an equal number of neighboring cores, and
    some jobs share a core if there are more jobs than cores. The jobs take as many GPUs as they
    have ranks, in turn, and share GPUs if there are too few.

    Args:
      jobs: Number of jobs that run at once.
      ranks: Number of ranks of each job.
      cores: Numbers of those that this process may use.
      gpu_count: GPUs that CUDA shows this process.
      environ: Environment of this process; its CUDA_VISIBLE_DEVICES names them, if set.
    """
    if jobs == 1:
        return [Place()]
    numbers = sorted(cores)
    named = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(gpu_count)] if named is None else named.split(",")[:gpu_count]
    groups = [",".join(names[i : i + ranks]) for i in range(0, len(names) - ranks + 1, ranks)]
    found = []
    for job in range(jobs):
        own = numbers[job * len(numbers) // jobs : (job + 1) * len(numbers) // jobs]
        shown = groups[job % len(groups)] if groups else None
        found.append(Place(frozenset(own or [numbers[job % len(numbers)]]), shown))
    return found


def ended(cells: Sequence[Cell], launcher: str, jobs: int = 1) -> Generator[Ended, None, None]:
    """Runs cells that have not finished before, `jobs` at once, and yields each when it has ended.

    Closing the generator, Ctrl-C and SIGTERM end the processes of all cells under way; these count
    as not run.

    Raises:
      KeyboardInterrupt: After Ctrl-C or SIGTERM.
      UserError: If a cell cannot be started, or its directory not be used.
    """
    ranks = max((cell.ranks for cell in cells), default=1)
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for place in places(
        jobs, ranks, os.sched_getaffinity(0), gpus.count() if jobs > 1 else 0, os.environ
    ):
        free.put(place)
    closed = threading.Event()
    one_at_a_time = {
        cell.directory: threading.Lock() for cell in cells
    }  # arms may come to the same flags

    with running.held_back() as signals, concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def stopped() -> bool:
            return bool(signals) or closed.is_set()

        def run(cell: Cell) -> tuple[Result, bool]:
            if stopped():
                raise KeyboardInterrupt
            with one_at_a_time[cell.directory]:
                place = free.get()
                try:
                    return running.ensure(
                        cell,
                        lambda cell, arguments: running.run_process(
                            cell, arguments, place, stopped
                        ),
                        launcher,
                    )
                finally:
                    free.put(place)

        numbers = {pool.submit(run, cell): number for number, cell in enumerate(cells)}
        try:
            for done in concurrent.futures.as_completed(numbers):
                yield Ended(numbers[done], *done.result())
        finally:
            closed.set()
            pool.shutdown(cancel_futures=True)
