"""Lets benchmarks prepare at the same time, but be timed one after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Environment variable with the directory of the files of `wait_for_turn`.
TURN_VARIABLE = "HYBRID_IMAGENET_BENCH_TURN"
READY_FILE = "ready"
GO_FILE = "go"


def wait_for_turn() -> None:
    """Waits until `python -m benchmarks arms` lets this benchmark begin its measurement.

    The benchmark creates the file `ready` in the directory that TURN_VARIABLE names, and waits for
    the file `go`. Without the variable it returns at once.
    """
    directory = os.environ.get(TURN_VARIABLE)
    if not directory:
        return
    (Path(directory) / READY_FILE).touch()
    while not (Path(directory) / GO_FILE).exists():
        time.sleep(0.05)
