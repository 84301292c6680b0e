"""Programs of the tests of saving, on each rank."""

from __future__ import annotations

import contextlib
import pathlib

import numpy as np

import hybrid_imagenet as hi
from tests.library import models
from tests.library.models import made
from tests.library.programs import ranks, weights


def hybrid():
    """The hybrid method over two epochs of each phase."""
    schedule = hi.schedules.hybrid(0.5, 4, warmup_epochs=2)
    return hi.DistributedOptimizer(
        hi.optimizers.Hybrid(adabound_lr=0.05),
        compression="none",
        schedule=schedule,
        # of four steps in an epoch: every save and every broadcast interrupts one
        gradient_accumulation_steps=3,
    )


def adamw():
    import keras

    inner = keras.optimizers.AdamW(0.02, gradient_accumulation_steps=2, global_clipnorm=1.0)
    return hi.DistributedOptimizer(inner, compression="none")


OPTIMIZERS = {"hybrid": hybrid, "adamw": adamw}


def fit(model, epochs, begin=0, first_rank=(), more=()):
    x, y = hi.data.shard(models.data(hi.size()), hi.rank(), hi.size())
    callbacks = [*hi.callbacks.default_callbacks(*first_rank), *more]
    model.fit(x, y, models.BATCH, epochs, 0, callbacks, shuffle=False, initial_epoch=begin)
    return model


def loaded(folder: str, name: str) -> dict:
    """Weights after four epochs; and after one to three, saved on rank 0, loaded on all ranks, and
    the rest.
    """
    with ranks():
        whole = weights(fit(made(OPTIMIZERS[name]()), 4))
        files, continued = [], []
        for epochs in (1, 3):
            file = pathlib.Path(folder) / f"{name}-{epochs}.keras"
            model = fit(made(OPTIMIZERS[name](), 3 + hi.rank()), epochs)
            if hi.rank() == 0:
                model.save(file)
            hi.communicator().barrier()
            files.append([str(file), weights(model), state(model)])
            continued.append(weights(fit(hi.load_model(file), 4, epochs)))
            continued.append(weights(fit(model, 4, epochs)))
        return {"whole": whole, "continued": continued, "files": files}


def state(model) -> list:
    """The optimizer's state."""
    return [np.asarray(v.numpy(), float).ravel().tolist() for v in model.optimizer.variables]


def interrupted(folder: str, kind: str) -> dict:
    """Weights of a run of four epochs, and of one that is begun again after two with Keras's or our
    own callback.
    """
    import keras

    with ranks():
        whole = weights(fit(made(hybrid()), 4))
        place = pathlib.Path(folder)

        class Power(keras.callbacks.Callback):
            """Fails on all ranks in the third epoch."""

            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    raise KeyboardInterrupt

        begun = []

        class Note(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                begun.append(epoch)

        def once(*more):
            model = made(hybrid(), 3 + hi.rank())
            first, own = [], []
            if kind == "keras":
                best = keras.callbacks.ModelCheckpoint(
                    place / "best.keras", monitor="loss", save_best_only=True
                )
                first = [
                    keras.callbacks.BackupAndRestore(place / "backup", delete_checkpoint=False),
                    best,
                ]
            else:
                own = [hi.callbacks.Checkpoint(place / "checkpoints")]
            return fit(model, 4, 0, first, [*own, Note(), *more])

        with contextlib.suppress(KeyboardInterrupt):
            once(Power())
        hi.communicator().barrier()
        return {"whole": whole, "again": weights(once()), "begun": begun}
