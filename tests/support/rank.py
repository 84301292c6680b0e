"""A rank of a pool: `python -m tests.support.rank FOLDER PROCESS` takes tasks from FOLDER until
PROCESS is gone.
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

from hybrid_imagenet.comm import environment
from tests.support import in_process, processes

SHORTEST, LONGEST = 0.02, 0.1  # seconds between two looks for work


def serve(folder: pathlib.Path, owner: int) -> None:
    """Answers one task after the other."""
    rank = environment.placement().rank
    number, pause = 1, SHORTEST
    _start()
    gc.freeze()  # what is imported stays: no collection of garbage need look at it
    while not (folder / "end").exists() and processes.alive(owner):
        task = folder / f"{number}.task"
        if not task.exists():
            time.sleep(pause)
            pause = min(1.1 * pause, LONGEST)  # many ranks wait while few work
            continue
        answer = _answer(*json.loads(task.read_text()))
        part = folder / f"{number}.{rank}.part"
        part.write_text(json.dumps(answer))
        part.rename(folder / f"{number}.{rank}")
        number, pause = number + 1, SHORTEST


def _start() -> None:
    """Makes ready what all programs need; MPI too, so that Horovod leaves it running when a program
    ends.
    """
    place = environment.placement()
    environment.configure_environment(place)
    import keras  # noqa: F401

    if place.size == 1 or importlib.util.find_spec("horovod") is None:
        return
    import horovod.tensorflow  # noqa: F401

    if "OMPI_COMM_WORLD_RANK" in os.environ:
        import mpi4py

        mpi4py.rc.errors = "default"
        from mpi4py import MPI  # noqa: F401

    _leave_numbers_to_horovod()


def _leave_numbers_to_horovod() -> None:
    """Has its own cycle time and fusion threshold apply: if told them, it crashes when it starts a
    second time.
    """
    from hybrid_imagenet.comm import horovod_engine as engine

    told = engine._configure_horovod

    def without_numbers(settings):
        result = told(settings)
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
    """Horovod ends on all ranks as soon as one leaves it: also while sets of other ranks still have
    work.
    """
    horovod, tf = sys.modules.get("horovod.tensorflow"), sys.modules["tensorflow"]
    if horovod and horovod.is_initialized():
        with contextlib.suppress(tf.errors.OpError):  # another rank has failed
            horovod.allreduce(tf.zeros([1]), op=horovod.Sum, name="finished")


def _disconnect() -> None:
    if "horovod.tensorflow" in sys.modules:
        sys.modules["horovod.tensorflow"].shutdown()
    for name in [name for name in os.environ if name.startswith("HOROVOD_") and name not in _GIVEN]:
        del os.environ[name]


_GIVEN = set(os.environ)

if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
