"""Serves the step benchmark: runs steps on request and prints their time.

Other frameworks run in other interpreters too, so this module needs the standard library only.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "@step "
"""Begins each line that is meant for the benchmark."""


def settings() -> dict[str, Any]:
    """Returns the settings that the benchmark passes as the first argument, such as `batch`."""
    return json.loads(sys.argv[1])


def send(**values: Any) -> None:
    """Prints a marked line for the benchmark, which ignores all other lines."""
    print(MARK + json.dumps(values), flush=True)


def serve(run: Callable[[int], float], **description: Any) -> None:
    """Warms up, prints a description, then runs as many steps as each line of input says.

    An empty line ends the loop.

    Args:
      run: Runs a number of steps and, after all work is done, returns the last loss.
      **description: Printed once, such as `name` and `version`.
    """
    start = time.perf_counter()
    run(2)
    send(ready=True, warmup_seconds=time.perf_counter() - start, **description)
    for line in sys.stdin:
        if not line.strip():
            break
        start = time.perf_counter()
        cpu_start = time.process_time()
        loss = run(int(line))
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        send(seconds=seconds, cpu_seconds=cpu_seconds, loss=loss, peak_bytes=peak_bytes)
