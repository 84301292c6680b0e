"""Ends a rank whose start hangs: the watchdog needs connected ranks, and a dead mount or a stopped rank waits before.

A thread of each rank begins once the rank knows its number, before TensorFlow is imported. It looks at the stage of the
start (`stages.START`) until the first training step is done.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time

from hybrid_imagenet.errors import EXIT_STALLED
from hybrid_imagenet.resilience.exit_code import end_with_line
from hybrid_imagenet.resilience.heartbeats import main_stack
from hybrid_imagenet.stages import Stages

_LOOK = 0.5
# A stage may last this many times --stall_timeout. The slow ones read every file name of a dataset, or compile.
_FACTOR, _SLOW_FACTOR = 2.0, 6.0
_LEAST = 60.0  # seconds that a stage may last in any case: imports take a while on a loaded host
_NO_THREAD = 15.0  # seconds more for a stage in which no thread of Python runs, as TensorFlow connecting its servers
_SLOW = ("reading the data set", "building the model", "compiling the step")


def watch(start: Stages, stall_timeout: float, rank: int) -> None:
    """Ends this process with EXIT_STALLED and one line if a stage of its start takes too long.

    Native code may keep the interpreter's lock all the while. Then faulthandler's own thread prints the stacks, and
    the exit code is EXIT_FAILURE.

    Args:
      start: tells the stage, and when the start is over.
      stall_timeout: --stall_timeout, in seconds; 0 watches nothing.
      rank: this process's number.
    """
    if stall_timeout:
        arguments = start, stall_timeout, rank
        threading.Thread(target=_watch, args=arguments, name="start limit", daemon=True).start()


def _watch(start: Stages, stall_timeout: float, rank: int) -> None:
    while not start.over.wait(min(_LOOK, stall_timeout / 10)):
        stage, since = start.stage
        seconds = time.monotonic() - since
        limit = max(_LEAST, stall_timeout * (_SLOW_FACTOR if stage in _SLOW else _FACTOR))
        faulthandler.dump_traceback_later(limit - seconds + _NO_THREAD, exit=True, file=2)
        if seconds > limit:
            where = next(iter(main_stack()), "unknown")
            end_with_line(
                f"error: rank {rank} on {socket.gethostname()} (process {os.getpid()}) hung for {seconds:.0f} s while "
                f"{stage or 'starting'} (--stall_timeout={stall_timeout:g}), in {where}: the job ends; look for a "
                "rank, a host or a file system that does not answer",
                EXIT_STALLED,
            )
    faulthandler.cancel_dump_traceback_later()
