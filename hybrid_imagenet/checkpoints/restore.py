"""Assigns the arrays of a checkpoint to the variables of a run."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.errors import UserError


def restore_arrays(checkpoint: Checkpoint, variables: Mapping[str, keras.Variable]) -> None:
    """Assigns every array of a checkpoint to the variable of its name.

    Raises:
      UserError: if names or shapes differ, that is, the checkpoint belongs to another model or optimizer; nothing is
        assigned then.
    """
    names, expected = set(checkpoint.arrays), set(variables)
    if names != expected:
        odd = sorted(names ^ expected)[0]
        where = "the checkpoint" if odd in names else "this run"
        raise UserError(
            f"{checkpoint.path} was written with --model={checkpoint.meta.get('model')} --optimizer="
            f"{checkpoint.meta.get('optimizer')}: only {where} has {odd}; resume with the flags it was started with"
        )
    for name, variable in variables.items():
        if checkpoint.arrays[name].shape != tuple(variable.shape):
            raise UserError(
                f"{checkpoint.path}: {name} has shape {checkpoint.arrays[name].shape}, this run needs "
                f"{tuple(variable.shape)} (the checkpoint has {checkpoint.meta.get('num_classes')} classes); resume "
                "with the model and data it was started with"
            )
    for name, variable in variables.items():
        variable.assign(checkpoint.arrays[name])


def check_position(checkpoint: Checkpoint, num_examples: int) -> None:
    """Compares where a run stands in its epoch with the size of the training set.

    Raises:
      UserError: if it stands behind the last example.
    """
    offset = checkpoint.meta["state"]["cursor"]["offset"]
    if offset >= num_examples:
        raise UserError(
            f"{checkpoint.path}: the run stands at example {offset} of its epoch, but there are {num_examples} "
            "training images; resume with the data it was started with"
        )
