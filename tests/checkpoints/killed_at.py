"""Runs the training program and kills it with all its ranks at a named moment.

Usage: `python -m tests.checkpoints.killed_at MOMENT N FLAGS...`, with flags of the training
program. When the moment comes, in or after step N, rank 0 sends SIGKILL to the launcher, the other
ranks and itself.
"""

import os
import random
import signal
import sys
import threading
import time

from hybrid_imagenet import comm, main
from tests.support import processes


def kill() -> None:
    """Kills the launcher, the other ranks and this process with SIGKILL."""
    launcher = os.getppid()
    ranks = processes.children(launcher)
    os.kill(launcher, signal.SIGKILL)
    for process in (*(r for r in ranks if r != os.getpid()), os.getpid()):
        os.kill(process, signal.SIGKILL)
    time.sleep(60)


def wrap(owner, name, before=None, after=None) -> None:
    """Makes a method call `before` or `after` with its arguments."""
    method = getattr(owner, name)

    def wrapped(*arguments, **options):
        if before:
            before(*arguments)
        result = method(*arguments, **options)
        if after:
            after(*arguments)
        return result

    setattr(owner, name, wrapped)


def arm(moment: str, number: int) -> None:
    """Prepares rank 0 to kill the job at the moment."""
    import pathlib

    from hybrid_imagenet.callbacks.batch_norm_statistics import BatchNormStatistics
    from hybrid_imagenet.callbacks.step_schedule import StepSchedule
    from hybrid_imagenet.callbacks.training_callback import CallbackSequence
    from hybrid_imagenet.checkpoints.store import CheckpointStore
    from hybrid_imagenet.training.evaluation import Validation
    from hybrid_imagenet.training.recorder import Recording
    from hybrid_imagenet.training.trainer import Trainer

    trainers = []
    wrap(Trainer, "train", before=trainers.append)

    def kill_if_due(*_) -> None:
        if trainers and trainers[0].state.step >= number:
            kill()

    def kill_when_writing(*_) -> None:
        if threading.current_thread().name == "checkpoint":
            kill_if_due()

    def kill_soon(trainer, *_) -> None:
        if trainer.state.step >= number:
            threading.Timer(random.Random(number).random() * 0.2, kill).start()

    def kill_when_finished(store, step, arrays, meta) -> None:
        if step >= number and meta["state"]["finished_epochs"] == meta["state"]["cursor"]["epoch"]:
            kill()

    if moment == "in step":
        wrap(Trainer, "_run_step", before=kill_soon)
    elif moment == "in checkpoint":
        wrap(os, "fsync", before=kill_when_writing)
    elif moment == "before rename":
        wrap(pathlib.Path, "replace", before=kill_when_writing)
    elif moment == "in batch norm synchronization":
        # The other ranks wait inside the synchronization.
        wrap(BatchNormStatistics, "_merge", before=kill_if_due)
    elif moment == "in validation":
        wrap(
            Validation,
            "run",
            before=lambda *_: (
                trainers[0].state.step >= number and threading.Timer(0.05, kill).start()
            ),
        )
    elif moment == "after epoch checkpoint":
        wrap(CheckpointStore, "_write", after=kill_when_finished)
    elif moment == "at phase switch":
        wrap(StepSchedule, "on_train_batch_begin", after=kill_if_due)
    elif moment.startswith("on_"):
        wrap(CallbackSequence, moment, after=kill_if_due)
    else:
        # The moment is "before epoch record" or "after epoch record".
        wrap(Recording, "epoch", **{moment.split()[0]: kill_if_due})


def run() -> None:
    """Starts the program with the moment armed."""
    moment = sys.argv[1]
    number = int(sys.argv[2])
    start = comm.start

    def started(settings, **options):
        communicator = start(settings, **options)
        if communicator.rank == 0:
            arm(moment, number)
        return communicator

    comm.start = started
    sys.exit(main.main(sys.argv[3:]))


if __name__ == "__main__":
    run()
