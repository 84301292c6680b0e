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


def settings() -> dict[str, Any]:
    """Returns the settings that the benchmark passes as the first argument, such as `batch`."""
    return json.loads(sys.argv[1])


def say(**values: Any) -> None:
    """Prints a marked line for the benchmark, which ignores all other lines."""
    print(MARK + json.dumps(values), flush=True)


def serve(run: Callable[[int], float], **description: Any) -> None:
    """Warms up, prints a description, then runs as many steps as each line of input says.

    An empty line ends it. `run(steps)` runs the steps and returns the last loss as a float, after
    all work is done.
    """
    start = time.perf_counter()
    run(2)
    say(ready=True, warmup_seconds=time.perf_counter() - start, **description)
    for line in sys.stdin:
        if not line.strip():
            break
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = run(int(line))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        say(seconds=seconds, cpu_seconds=cpu_seconds, loss=loss, peak_bytes=peak)
