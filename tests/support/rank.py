"""Runs a rank of a pool: `python -m tests.support.rank FOLDER PROCESS`.

It takes tasks from FOLDER until PROCESS has ended.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback

from hybrid_imagenet.cluster import environment
from tests.support import in_process, processes

# How long to wait before looking for the next task again. The pause grows, because often many ranks
# wait while a few work.
SHORTEST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.1


def serve(folder: pathlib.Path, owner: int) -> None:
    """Runs the tasks one after the other."""
    rank = environment.read_placement().rank
    number = 1
    pause = SHORTEST_PAUSE_SECONDS
    _start()
    # Imported modules remain, so garbage collection can skip them.
    gc.freeze()
    while not (folder / "end").exists() and processes.alive(owner):
        task = folder / f"{number}.task"
        if not task.exists():
            time.sleep(pause)
            pause = min(1.1 * pause, LONGEST_PAUSE_SECONDS)
            continue
        answer = _answer(*json.loads(task.read_text()))
        unfinished = folder / f"{number}.{rank}.part"
        unfinished.write_text(json.dumps(answer))
        unfinished.rename(folder / f"{number}.{rank}")
        number += 1
        pause = SHORTEST_PAUSE_SECONDS


def _start() -> None:
    """Prepares what all programs need, including MPI.

    If MPI runs before Horovod starts, Horovod leaves it running when a program ends.
    """
    placement = environment.read_placement()
    environment.configure_environment(placement)
    import keras  # noqa: F401

    if placement.size == 1 or importlib.util.find_spec("horovod") is None:
        return
    import horovod.tensorflow  # noqa: F401

    if "OMPI_COMM_WORLD_RANK" in os.environ:
        import mpi4py

        mpi4py.rc.errors = "default"
        from mpi4py import MPI  # noqa: F401

    _leave_numbers_to_horovod()


def _leave_numbers_to_horovod() -> None:
    """Removes the variables of cycle time and fusion threshold, so that Horovod uses its defaults.

    Horovod crashes if these variables are set when it starts a second time in a process.
    """
    from hybrid_imagenet.comm import horovod_engine as engine

    configure_horovod = engine._configure_horovod

    def without_numbers(settings):
        result = configure_horovod(settings)
        for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"):
            os.environ.pop(name, None)
        return result

    engine._configure_horovod = without_numbers


def _answer(module: str, name: str, arguments: list) -> dict:
    try:
        with in_process.alone():
            value = getattr(importlib.import_module(module), name)(*arguments)
        _wait_for_all()
        return {"value": value, "error": None}
    except Exception:
        return {"value": None, "error": traceback.format_exc()}
    finally:
        _disconnect()


def _wait_for_all() -> None:
    """Waits until all ranks have finished the task.

    When one rank shuts Horovod down, it ends on all ranks, even if process sets of other ranks
    still have work.
    """
    horovod = sys.modules.get("horovod.tensorflow")
    tf = sys.modules["tensorflow"]
    if horovod and horovod.is_initialized():
        # This fails if another rank has failed.
        with contextlib.suppress(tf.errors.OpError):
            horovod.allreduce(tf.zeros([1]), op=horovod.Sum, name="finished")


def _disconnect() -> None:
    if "horovod.tensorflow" in sys.modules:
        sys.modules["horovod.tensorflow"].shutdown()
    for name in set(os.environ) - _INITIAL_VARIABLES:
        if name.startswith("HOROVOD_"):
            del os.environ[name]


_INITIAL_VARIABLES = set(os.environ)

if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
