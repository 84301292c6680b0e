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
    difference = _difference(checkpoint, variables)
    if difference:
        raise UserError(
            f"{checkpoint.path} is of another run: {difference}; resume with the flags and data it was started with"
        )
    for name, variable in variables.items():
        variable.assign(checkpoint.arrays[name])


def _difference(checkpoint: Checkpoint, variables: Mapping[str, keras.Variable]) -> str:
    """Returns a sentence on the first thing that a checkpoint and a run do not share; "" if all fits."""
    odd = sorted(set(checkpoint.arrays) ^ set(variables), key=lambda name: (not name.startswith("model/"), name))
    if odd:
        part = odd[0].partition("/")[0]
        theirs = next((name for name in odd if name in checkpoint.arrays and name.startswith(part)), None)
        ours = next((name for name in odd if name in variables and name.startswith(part)), None)
        more = "the checkpoint" if ours is None else "this run"
        if part == "average":
            return f"only {more} has averaged weights (--ema_decay)"
        if part != "model":
            return f"it was written with --optimizer={checkpoint.meta.get('optimizer')}, which keeps other values"
        layers = [f"{_layer(name, variables)} {where}" for name, where in ((theirs, "there"), (ours, "here")) if name]
        return f"the networks differ from layer {', '.join(layers)}"
    for name, variable in variables.items():
        before, now = checkpoint.arrays[name].shape, tuple(variable.shape)
        if before != now:
            shapes = (" x ".join(map(str, shape)) or "a number" for shape in (before, now))
            classes = checkpoint.meta.get("num_classes")
            known = f" (it has {classes} classes)" if classes else ""
            return f"layer {_layer(name, variables)} has weights of {' there, '.join(shapes)} here{known}"
    return ""


def _layer(name: str, variables: Mapping[str, keras.Variable]) -> str:
    """Returns the layer of a variable: `model/0007/stem/kernel` belongs to `stem`."""
    path = variables[name].path if name in variables else name.split("/", 2)[-1]
    return path.rpartition("/")[0] or path


def described(order: SampleOrder) -> dict[str, int]:
    """Returns what a checkpoint tells of the order of examples, beside the data that are in order."""
    return {"seed": order.seed, "shuffle_window": order.window}


def check_position(checkpoint: Checkpoint, order: SampleOrder) -> None:
    """Compares the order of the epoch in which a run stands with that of the examples now.

    Raises:
      UserError: inside of an epoch, if --seed or --shuffle_window would give some examples twice and others not at all.
    """
    offset, epoch = (checkpoint.meta["state"]["cursor"][name] for name in ("offset", "epoch"))
    before, now = checkpoint.meta["order"], described(order)
    for name in now if offset else ():
        if before[name] != now[name]:
            raise UserError(
                f"--{name}={now[name]}: the run stands inside of epoch {epoch + 1}, whose order has --{name}="
                f"{before[name]}; resume with that, or change it at the end of an epoch"
            )
