"""Trains as V x ranks GPUs in several layouts, and keeps the final weights.

Run by test_virtual_gpus.
"""

from __future__ import annotations

import pathlib
from typing import ClassVar

import keras
import numpy as np

from hybrid_imagenet import comm, train
from hybrid_imagenet import config as configuration
from hybrid_imagenet.callbacks.callback_state import saved_variables
from hybrid_imagenet.comm import Communicator

# The 80 training images, 16 per update on four GPUs, give 20 updates in four epochs.
BASE = (
    *(
        "--dataset=fashion_mnist",
        "--augmentation=shift",
        "--model=resnet8",
        "--model_width=4",
        "--stem=3x3",
        "--image_size=8",
    ),
    *(
        "--precision=float32",
        "--compression=none",
        "--tuning_split=16",
        "--epochs=4",
        "--per_gpu_batch=4",
    ),
    *("--eval_every_epochs=2", "--stall_timeout=0", "--progress=none", "--nozero_last_gamma"),
)
# Ranks or virtual GPUs whose batches are normalized together.
NEIGHBORS = 2
HYBRID = ("--optimizer=hybrid", "--warmup_epochs=2", "--lars_eta=0.01")
MIXING = ("--mixup_alpha=0.4", "--cutmix_alpha=1")
METHODS = {"hybrid, last, groups of two": (*HYBRID, f"--bn_group={NEIGHBORS}")}
SHORT = {"hybrid, last, one group of four, mixed images": (*HYBRID, "--bn_group=4", *MIXING)}
LONG = {
    "sgd, last, groups of two": (
        "--optimizer=sgd",
        f"--bn_group={NEIGHBORS}",
        "--lr=0.02",
        "--lr_scaling=none",
    ),
    "lars, moving, larger batch": (
        *("--optimizer=lars", "--batch_norm=moving", "--lr_schedule=poly", "--warmup_epochs=1"),
        *("--epochs=5", "--batch_schedule=0:4,3:6", "--lars_eta=0.01", "--lr_scaling=batch"),
    ),
    "sgd, precise, accumulation": (
        *(
            "--optimizer=sgd",
            "--sgd_nesterov",
            "--batch_norm=precise",
        ),
        *(
            "--gradient_accumulation_steps=2",
            "--per_gpu_batch=2",
            "--lr_schedule=step",
            "--lr_steps=2,3",
            "--lr=0.01",
        ),
    ),
    "lars, synchronized, random batches": (
        *(
            "--optimizer=lars",
            "--sync_batch_norm",
            "--batch_norm=moving",
            "--random_batch=1",
            "--lars_eta=0.01",
        ),
        *("--lr_schedule=poly", "--warmup_epochs=1", "--model_width=16"),
    ),
    "adabound, synchronized": (
        *(
            "--optimizer=adabound",
            "--sync_batch_norm",
            "--batch_norm=moving",
            "--adabound_lr_scaling",
        ),
        *("--lr_schedule=cosine", "--ema_decay=0.9"),
    ),
    "lars, moving, averaged": (
        *(
            "--optimizer=lars",
            "--batch_norm=moving",
            "--lr_schedule=poly",
            "--warmup_epochs=1",
            "--ema_decay=0.8",
        ),
        *("--lars_variant=larc", "--label_smoothing=0.1"),
    ),
    "muon": (
        "--optimizer=muon",
        "--lr_scaling=none",
        "--lr=0.02",
        "--lr_schedule=poly",
        "--warmup_epochs=1",
    ),
    "lamb": (
        "--optimizer=lamb",
        "--lr_scaling=none",
        "--lr=0.02",
        "--lr_schedule=poly",
        "--warmup_epochs=1",
    ),
}


class KeepResult(keras.callbacks.Callback):
    """Keeps the final state of training."""

    result: ClassVar[dict[str, np.ndarray]] = {}

    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer

    def on_train_end(self, logs=None):
        # Keras numbers the paths of variables differently for each network of a process, so the key
        # is the position of a variable.
        variables = {
            **self.trainer.components.variables(),
            **saved_variables(self.trainer.callbacks),
        }
        KeepResult.result = {
            name.split("/")[0] + name.split("/")[1]: v.numpy() for name, v in variables.items()
        }
        KeepResult.result["steps"] = np.array(self.trainer.state.step)


def final(
    data: str, folder: pathlib.Path, communicator: Communicator, flags, virtual: int, *more: str
):
    """Returns the variables at the end of a run, by part and number."""
    run_dir = folder / "run"
    arguments = [
        *BASE,
        f"--data_dir={data}",
        f"--run_dir={run_dir}",
        f"--virtual_gpus={virtual}",
        *flags,
        *more,
    ]
    train.run(
        configuration.resolve(arguments, communicator.size),
        communicator,
        lambda trainer: [KeepResult(trainer)],
    )
    return KeepResult.result


def job(data: str, folder: str, methods, engine: str = "horovod") -> None:
    """Trains four GPUs with each method on the available ranks; rank 0 saves the weights."""
    virtual = 4 // comm.read_placement().size
    communicator = comm.start(
        comm.CommunicationSettings(engine=engine, neighbors=NEIGHBORS // virtual)
    )
    for number, flags in enumerate(methods):
        name = f"{number}-{communicator.size}x{virtual}"
        weights = final(
            data, pathlib.Path(folder, f"{name}-{communicator.rank}"), communicator, flags, virtual
        )
        if communicator.rank == 0:
            np.savez(pathlib.Path(folder, f"{name}.npz"), **weights)
