"""Programs for the tests of saving, which run on each rank."""

from __future__ import annotations

import contextlib
import pathlib

import numpy as np

import hybrid_imagenet as hi
from hybrid_imagenet.errors import UserError
from tests.library import models
from tests.library.models import compiled
from tests.library.programs import ranks, weights


def hybrid():
    """Returns the hybrid method with two epochs in each phase."""
    schedule = hi.schedules.hybrid(0.5, 4, warmup_epochs=2)
    return hi.DistributedOptimizer(
        hi.optimizers.Hybrid(adabound_lr=0.05),
        schedule=schedule,
        # An epoch has four steps, so every save and broadcast falls inside an accumulation.
        gradient_accumulation_steps=3,
    )


def adamw():
    import keras

    inner = keras.optimizers.AdamW(0.02, gradient_accumulation_steps=2, global_clipnorm=1.0)
    return hi.DistributedOptimizer(inner)


OPTIMIZERS = {"hybrid": hybrid, "adamw": adamw}


def fit(model, epochs, begin=0, first_rank=(), more=()):
    x, y = hi.data.shard(models.data(hi.size()), hi.rank(), hi.size())
    callbacks = [*hi.callbacks.default_callbacks(*first_rank), *more]
    model.fit(x, y, models.BATCH, epochs, 0, callbacks, shuffle=False, initial_epoch=begin)
    return model


def loaded(folder: str, name: str) -> dict:
    """Returns weights after four epochs, at once and after a save in between.

    Rank 0 saves the model and all ranks load it and continue.
    """
    with ranks():
        whole = weights(fit(compiled(OPTIMIZERS[name]()), 4))
        files = []
        continued = []
        for epochs in (1, 3):
            file = pathlib.Path(folder) / f"{name}-{epochs}.keras"
            model = fit(compiled(OPTIMIZERS[name](), 3 + hi.rank()), epochs)
            if hi.rank() == 0:
                model.save(file)
            hi.communicator().barrier()
            files.append([str(file), weights(model), state(model)])
            continued.append(weights(fit(hi.load_model(file), 4, epochs)))
            continued.append(weights(fit(model, 4, epochs)))
        return {"whole": whole, "continued": continued, "files": files}


def state(model) -> list:
    """Returns the optimizer's state."""
    return [np.asarray(v.numpy(), float).ravel().tolist() for v in model.optimizer.variables]


def interrupted(folder: str, kind: str) -> dict:
    """Returns weights of a run of four epochs, at once and with a restart in the third epoch.

    `kind` selects Keras's callback or the library's.
    """
    import keras

    with ranks():
        whole = weights(fit(compiled(hybrid()), 4))
        directory = pathlib.Path(folder)

        class PowerFailure(keras.callbacks.Callback):
            """Fails on all ranks in the third epoch."""

            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    raise KeyboardInterrupt

        epochs = []

        class RecordEpochs(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                epochs.append(epoch)

        def start(*more):
            model = compiled(hybrid(), 3 + hi.rank())
            first = []
            all_ranks = []
            if kind == "keras":
                best = keras.callbacks.ModelCheckpoint(
                    directory / "best.keras", monitor="loss", save_best_only=True
                )
                first = [
                    keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=False),
                    best,
                ]
            else:
                all_ranks = [hi.callbacks.Checkpoint(directory / "checkpoints")]
            return fit(model, 4, 0, first, [*all_ranks, RecordEpochs(), *more])

        with contextlib.suppress(KeyboardInterrupt):
            start(PowerFailure())
        hi.communicator().barrier()
        return {"whole": whole, "again": weights(start()), "begun": epochs}


def private_callback(folder: str) -> dict:
    """Trains with two callbacks of a class on rank 0, and with one of them on all ranks.

    Returns the counts of both after a resume, and the error of a `fit` for which nobody can know
    which of the callbacks is on all ranks.
    """
    import keras

    class Counter(keras.callbacks.Callback):
        def __init__(self, count):
            super().__init__()
            self.count = count

        def on_epoch_end(self, epoch, logs=None):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def start(epochs, first_rank, more):
        model = compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True)
        checkpoint = hi.callbacks.Checkpoint(pathlib.Path(folder) / "checkpoints")
        fit(model, epochs, first_rank=first_rank, more=[*more, checkpoint])

    with ranks():
        start(1, [Counter(100)], [Counter(0)])
        first_rank = [Counter(50)]
        shared = Counter(50)
        start(2, first_rank, [shared])
        counts = [shared.count]
        if hi.rank() == 0:
            counts.append(first_rank[0].count)
        error = ""
        try:
            start(3, [], [Counter(0)] if hi.rank() else [Counter(0), Counter(0)])
        except UserError as raised:
            error = str(raised)
        return {"counts": counts, "error": error}


def first_average() -> list:
    """Returns the average with which `fit` begins, for a model with other weights on each rank."""
    import keras

    begun = []
    with ranks():
        average = hi.optimizers.WeightAverage(0.9)
        optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1), average=average)

        def record(logs):
            begun.extend(value.numpy().tolist() for value in average.variables)

        model = compiled(optimizer, 3 + hi.rank())
        fit(model, 1, more=[keras.callbacks.LambdaCallback(on_train_begin=record)])
    return begun


def failed_write(folder: str) -> str:
    """Returns the error of a rank if rank 0 cannot write its checkpoint."""
    from unittest import mock

    from hybrid_imagenet.checkpoints import archive

    with ranks(), mock.patch.object(archive, "write", side_effect=OSError(28, "disk full")):
        checkpoint = hi.callbacks.Checkpoint(pathlib.Path(folder) / "checkpoints")
        try:
            fit(compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True), 1, more=[checkpoint])
        except UserError as error:
            return str(error)
    return ""
