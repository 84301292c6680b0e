"""Runs cells: starts the training program as a user would, one process tree per cell."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.cluster.environment import openmpi_prefix
from hybrid_imagenet.errors import EXIT_PREEMPTED, UserError, without_secrets
from studies import trial_runs
from studies.trial_runs import Cell

LAUNCHERS = ("mpirun", "horovodrun")
# As horovodrun starts mpirun, and as launch/local.sh does.
_MPI_ARGUMENTS = (
    "--quiet",
    "--oversubscribe",
    "--mca",
    "pml",
    "ob1",
    "--mca",
    "btl",
    "^openib",
    "-bind-to",
    "none",
    "-map-by",
    "slot",
)
# The state at the end is enough: no run is resumed.
_SAVING = ("--checkpoint_every_epochs=1000000", "--keep_checkpoints=1", "--nokeep_best")
_GRACE_SECONDS = 20.0
_LOOK_SECONDS = 0.2
_ROOT = pathlib.Path(__file__).parents[1]

Run = Callable[[Cell, Sequence[str]], int]


@dataclasses.dataclass(frozen=True)
class Place:
    """The cores and GPUs of the host that a cell may use.

    None means all that this process may use.

    Attributes:
      cores: Their numbers.
      gpus: Its CUDA_VISIBLE_DEVICES.
    """

    cores: frozenset[int] | None = None
    gpus: str | None = None


def command(cell: Cell, launcher: str = "mpirun") -> list[str]:
    """Returns the command line of a cell; a single rank needs no launcher."""
    start: list[str] = []
    if cell.ranks > 1:
        arguments = _MPI_ARGUMENTS if launcher == "mpirun" else ()
        start = [_find(launcher), *arguments, "-np", str(cell.ranks)]
    program = [sys.executable, "-m", "hybrid_imagenet.main"]
    return [*start, *program, *_SAVING, *cell.flags, f"--run_dir={cell.run_dir}"]


def _find(launcher: str) -> str:
    """Returns the launcher of this Python's environment, or else the one on PATH."""
    in_environment = pathlib.Path(sys.prefix) / "bin" / launcher
    return str(in_environment) if in_environment.exists() else launcher


def environment() -> dict[str, str]:
    """The environment of a cell, as launch/env.sh makes it."""
    values = dict(os.environ)
    if (prefix := openmpi_prefix()) is not None:
        values.setdefault("OPAL_PREFIX", prefix)
    if os.geteuid() == 0:
        values |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not any(map(shutil.which, ("ssh", "rsh", "srun"))):
        values.setdefault("OMPI_MCA_plm", "isolated")
    values.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    values["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), values.get("PYTHONPATH"))))
    return values


def resumable(work: Callable[[], int]) -> int:
    """The exit code of a program that can be stopped and continues when it is started again.

    SIGTERM counts as Ctrl-C; a UserError is one line on standard error.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [
        each
        for each in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(each) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command continues where this one ended", file=sys.stderr)
        return EXIT_PREEMPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ensure(cell: Cell, run: Run, launcher: str = "mpirun") -> tuple[trial_runs.Result, bool]:
    """Runs a cell unless it has finished before; returns its result and whether it was run now.

    What an unfinished or failed run left is removed first.
    """
    before = trial_runs.read(cell)
    if before.status in (trial_runs.FINISHED, trial_runs.DIVERGED):
        return before, False
    _clear(cell)
    marker: dict[str, Any] = {
        "flags": [without_secrets(flag) for flag in cell.flags],
        "ranks": cell.ranks,
    }
    _write(cell.marker, marker)
    began = time.monotonic()
    code = run(cell, command(cell, launcher))
    _write(cell.marker, marker | {"exit_code": code, "seconds": round(time.monotonic() - began, 1)})
    return trial_runs.read(cell), True


def _clear(cell: Cell) -> None:
    """Makes the cell's directory, without what an earlier run left there.

    Raises:
      UserError: If it holds something that no study has written, or cannot be written.
    """
    try:
        if cell.directory.exists() and any(cell.directory.iterdir()):
            if not cell.marker.exists():
                raise UserError(f"{cell.directory} holds other files: give another --out")
            if files.lock_holder(cell.run_dir) is not None:
                raise UserError(
                    f"{cell.directory}: the same study runs now: wait for it, or give another --out"
                )
            shutil.rmtree(cell.run_dir, ignore_errors=True)
        cell.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out: {cell.directory}: {error.strerror}; give a directory that can be written"
        ) from None


def _write(path: pathlib.Path, values: dict[str, Any]) -> None:
    try:
        with files.atomic_replace(path) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out: {path}: {error.strerror}; give a directory that can be written"
        ) from None


def run_process(
    cell: Cell, arguments: Sequence[str], place: Place, stop: Callable[[], bool]
) -> int:
    """Runs a command to its end and returns its exit code.

    Its output goes to the cell's output file. On Ctrl-C, or in a thread once `stop()` is true, its
    processes are ended before KeyboardInterrupt is raised further.

    Raises:
      UserError: If it cannot be started.
    """
    process = None
    variables = environment()
    if place.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = place.gpus
    if place.cores is not None:
        # This sets the cores of this thread, and the process inherits them.
        os.sched_setaffinity(0, place.cores)
    with cell.output.open("wb") as output:
        try:
            with held_back():
                process = subprocess.Popen(
                    arguments,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return _wait(process, stop)
        except OSError as error:
            raise UserError(
                f"{arguments[0]}: {error.strerror}; install it, or use another --launcher"
            ) from None
        finally:
            if process is not None and process.poll() is None:
                _end(process)


def _wait(process: subprocess.Popen[bytes], stop: Callable[[], bool]) -> int:
    """Returns the exit code; raises KeyboardInterrupt when `stop()` is true."""
    while not stop():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
    raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[list[int]]:
    """Keeps Ctrl-C and SIGTERM until the block is done.

    Yields a list to which each of these signals is added. It is for what must not stop halfway:
    a process that was just started must not be forgotten, nor a lock that threads share. Signals
    reach only the main thread: in others nothing is done.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {
        number: signal.signal(number, lambda number, frame: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for caught_number in caught:
            signal.raise_signal(caught_number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to stop its ranks, and ends whatever is left after a while."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
