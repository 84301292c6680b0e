"""Starts real ranks for a test: a pool that serves many tests, or ranks of a test's own.

A pool starts its ranks once with mpirun; each imports TensorFlow, and Horovod if it is installed,
and then takes work: the name of a function in a module of the tests, with arguments that JSON
carries. Each function starts communication as a program does and ends it, so that every call may
have other settings. `tests/conftest.py` keeps the pools.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_imagenet.comm.process import ENGINE_VARIABLE
from hybrid_imagenet.training.preflight import CHECKED_VARIABLE
from tests.support import processes

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
HOROVODRUN = Path(sys.prefix) / "bin" / "horovodrun"
ROOT = Path(__file__).parents[1]
LAUNCHERS = {
    "": [],
    "mpi": [str(MPIRUN), "--oversubscribe", "--bind-to", "none", "-np"],
}


def environment() -> dict[str, str]:
    """Variables of a launcher and its ranks."""
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OPAL_PREFIX": sys.prefix,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def has_horovod() -> bool:
    """Returns whether Horovod is installed."""
    return importlib.util.find_spec("horovod") is not None


def skip_without_horovod() -> None:
    """Skips the test that calls it if Horovod is not installed."""
    if not has_horovod():
        pytest.skip(
            "Horovod is not installed; --engine=tensorflow runs such tests without it where"
            " they can"
        )


class Pool:
    """Ranks that wait for work.

    Args:
      size: number of ranks.
      launcher: "mpi", or "" for a single process without a launcher.
    """

    def __init__(self, size: int, launcher: str = "mpi"):
        self.size, self._launcher = size, launcher
        self._process: subprocess.Popen | None = None
        self._calls = 0

    def call(self, function: Callable, *arguments: Any, timeout: float = 600) -> list:
        """Calls a function of a module on every rank; returns the results in the order of ranks.

        After a failure the ranks are ended; the next call starts others. Skips the test if several
        ranks are to be connected by Horovod, which is not installed: the argument `engine` of the
        function says so, else the option --engine of the tests.

        Raises:
          AssertionError: if a rank raised, left or is not done in time, with the ranks' output.
        """
        if self.size > 1 and _engine_of(function, arguments) == "horovod":
            skip_without_horovod()
        if self._process is None:
            self._start()
        assert self._process is not None
        self._calls += 1
        task = [function.__module__, function.__qualname__, list(arguments)]
        _write(self._folder / f"{self._calls}.task", task)
        try:
            return self._gather(time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    def _gather(self, deadline: float) -> list:
        paths = [self._folder / f"{self._calls}.{rank}" for rank in range(self.size)]
        while True:
            # Looked at before the answers, so that those of ranks which have left in good order are
            # not missed.
            left = self._process.poll() is not None
            found = [json.loads(path.read_text()) for path in paths if path.exists()]
            for answer in found:
                assert answer["error"] is None, self._told(answer["error"])
            if len(found) == self.size:
                return [answer["value"] for answer in found]
            assert not left, self._told(f"a rank has left: exit code {self._process.returncode}")
            assert time.monotonic() < deadline, self._told(
                f"{len(found)} of {self.size} ranks were done in time"
            )
            time.sleep(0.02)

    def _told(self, reason: str) -> str:
        return f"{reason}\n{(self._folder / 'log').read_text(errors='replace')[-6000:]}"

    def _start(self) -> None:
        """Starts the ranks and does not wait for them."""
        self._held = tempfile.TemporaryDirectory()
        self._folder, self._calls = Path(self._held.name), 0
        count = [str(self.size)] if self._launcher else []
        command = [*LAUNCHERS[self._launcher], *count, sys.executable, "-m", "tests.support.rank"]
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(self._folder), str(os.getpid())],
                env=environment()
                | ({CHECKED_VARIABLE: "1"} if self.size > 1 else {}),  # all ranks return alike
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        """Ends the ranks."""
        if self._process is None:
            return
        _write(self._folder / "end", None)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            for process in processes.descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            self._process.kill()
            self._process.wait()
        self._process = None
        self._held.cleanup()


def _engine_of(function: Callable, arguments: Sequence[Any]) -> str:
    """Returns the engine that a call on several ranks connects them by."""
    bound = inspect.signature(function).bind(*arguments)
    bound.apply_defaults()
    engine: str = bound.arguments.get("engine", os.environ.get(ENGINE_VARIABLE, "horovod"))
    return engine


def _write(path: Path, value: Any) -> None:
    """The whole file appears at once."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value))
    part.rename(path)


@contextlib.contextmanager
def own(size: int, launcher: str = "mpi") -> Iterator[Pool]:
    """Ranks for one test alone: with another launcher or number of ranks, or in a state that others
    must not meet.
    """
    pool = Pool(size, launcher)
    try:
        yield pool
    finally:
        pool.close()
