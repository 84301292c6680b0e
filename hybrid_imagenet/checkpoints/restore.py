"""Assigns the arrays of a checkpoint to the variables of a run."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.sampling import SampleOrder


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


def described(order: SampleOrder) -> dict[str, int]:
    """Returns what a checkpoint tells of the order of examples: all that it follows from but the shards' sizes."""
    return {"num_examples": order.num_examples, "seed": order.seed, "shuffle_window": order.window}


def check_position(checkpoint: Checkpoint, order: SampleOrder) -> str:
    """Compares the order of the epoch in which a run stands with that of the examples now.

    Checkpoints of older versions do not tell their order.

    Returns:
      What is to be said: that the rest of the epoch is another one, as the number of examples has changed; else "".

    Raises:
      UserError: inside of an epoch, if it stands behind the last example, or if --seed or --shuffle_window would give
        some examples twice and others not at all.
    """
    offset, epoch = (checkpoint.meta["state"]["cursor"][name] for name in ("offset", "epoch"))
    if offset >= order.num_examples:
        raise UserError(
            f"{checkpoint.path}: the run stands at example {offset} of its epoch, but there are {order.num_examples} "
            "training images; resume with the data it was started with"
        )
    now = described(order)
    before = now | {name: value for name, value in checkpoint.meta.get("order", {}).items() if name in now}
    if not offset or before == now:
        return ""
    for name in ("seed", "shuffle_window"):
        if before[name] != now[name]:
            raise UserError(
                f"--{name}={now[name]}: the run stands inside of epoch {epoch + 1}, whose order has --{name}="
                f"{before[name]}; resume with that, or change it at the end of an epoch"
            )
    return (
        f"{now['num_examples']} training images, {before['num_examples']} when the checkpoint was written: the rest of "
        f"epoch {epoch + 1} is that of another order"
    )
