"""Starts real ranks for a test: a pool that serves many tests, or ranks for one test alone.

A pool starts its ranks once with mpirun. Each rank imports TensorFlow, and Horovod if it is
installed, and then waits for tasks. A task is the name of a function in a module of the tests,
with arguments that can be written as JSON. Each function connects the ranks as a program does and
disconnects them, so that every call may have other settings. `tests/conftest.py` owns the pools.
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
    """Returns the environment of a launcher and its ranks."""
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
    """Holds ranks that wait for tasks.

    Args:
      size: Number of ranks.
      launcher: "mpi", or "" for a single process without a launcher.
    """

    def __init__(self, size: int, launcher: str = "mpi"):
        self.size = size
        self._launcher = launcher
        self._process: subprocess.Popen | None = None
        self._calls = 0

    def call(self, function: Callable, *arguments: Any, timeout: float = 600) -> list:
        """Calls a function of a module on every rank; returns the results in the order of ranks.

        After a failure the ranks are ended, and the next call starts new ones. The test is skipped
        if Horovod would have to connect several ranks but is not installed. The engine is the
        argument `engine` of the function, or else the option --engine of the tests.

        Raises:
          AssertionError: If a rank raised an error, ended or was too slow. The message has the
            output of the ranks.
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
            # Read this before the answers. Otherwise the answers of ranks that end normally in
            # between would be missed.
            has_ended = self._process.poll() is not None
            answers = [json.loads(path.read_text()) for path in paths if path.exists()]
            for answer in answers:
                assert answer["error"] is None, self._with_output(answer["error"])
            if len(answers) == self.size:
                return [answer["value"] for answer in answers]
            assert not has_ended, self._with_output(
                f"a rank has ended: exit code {self._process.returncode}"
            )
            assert time.monotonic() < deadline, self._with_output(
                f"{len(answers)} of {self.size} ranks were done in time"
            )
            time.sleep(0.02)

    def _with_output(self, reason: str) -> str:
        return f"{reason}\n{(self._folder / 'log').read_text(errors='replace')[-6000:]}"

    def _start(self) -> None:
        """Starts the ranks and does not wait for them."""
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._calls = 0
        count = [str(self.size)] if self._launcher else []
        command = [*LAUNCHERS[self._launcher], *count, sys.executable, "-m", "tests.support.rank"]
        # Rank 0 alone would check the disk. All ranks of a pool must return the same, even after an
        # error, so no rank checks it.
        variables = {CHECKED_VARIABLE: "1"} if self.size > 1 else {}
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(self._folder), str(os.getpid())],
                env=environment() | variables,
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
        self._temporary.cleanup()


def _engine_of(function: Callable, arguments: Sequence[Any]) -> str:
    """Returns the engine that connects the ranks in a call."""
    bound = inspect.signature(function).bind(*arguments)
    bound.apply_defaults()
    engine: str = bound.arguments.get("engine", os.environ.get(ENGINE_VARIABLE, "horovod"))
    return engine


def _write(path: Path, value: Any) -> None:
    """Writes a file as JSON so that a reader finds either the whole file or none."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


@contextlib.contextmanager
def own(size: int, launcher: str = "mpi") -> Iterator[Pool]:
    """Starts ranks for one test alone.

    A test needs them if it uses another launcher or number of ranks, or leaves the ranks in a state
    that would disturb other tests.
    """
    pool = Pool(size, launcher)
    try:
        yield pool
    finally:
        pool.close()
