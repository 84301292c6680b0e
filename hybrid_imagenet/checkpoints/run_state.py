"""The position of a run, which a checkpoint stores beside the variables, and what gives both back
to a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass
class RunState:
    """The position of a run, the same on every rank.

    Attributes:
      cursor: the next example to read.
      step: optimizer steps done, skipped ones included.
      images: training images processed over all ranks.
      finished_epochs: epochs whose validation is done too; behind `cursor.epoch` between the last
        step of an epoch and the end of its validation.
      closed_at: fractional epochs done when the newest epoch record was made: at the end of an
        epoch, or inside of one where a validation or the end of the run lies.
      seconds: wall time of earlier sessions and this one up to the last record, in seconds.
      best_top1: the best validation top-1 so far, a fraction.
      best_epoch: the epochs that were done when it was first had, fractional inside of an epoch; 0
        before the first validation.
      hyper: the schedule's values of the last step; empty before the first.
      stop: why the loop ends early: "", "preempted" or "target".
    """

    cursor: Cursor = dataclasses.field(default_factory=lambda: Cursor(0, 0))
    step: int = 0
    images: int = 0
    finished_epochs: int = 0
    closed_at: float = 0.0
    seconds: float = 0.0
    best_top1: float = 0.0
    best_epoch: float = 0
    hyper: dict[str, float] = dataclasses.field(default_factory=dict)
    stop: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form."""
        values = dataclasses.asdict(self)
        values.pop("stop")
        return values

    def restore(self, values: dict[str, Any]) -> None:
        """Takes over what `to_dict` gave, in place: all parts of a run hold the same state."""
        vars(self).update(vars(RunState.from_dict(values)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverts `to_dict`."""
        return cls(
            **{**values, "cursor": Cursor(values["cursor"]["epoch"], values["cursor"]["offset"])}
        )


def restore_arrays(checkpoint: Checkpoint, variables: Mapping[str, keras.Variable]) -> None:
    """Assigns every array of a checkpoint to the variable of its name.

    Raises:
      UserError: if names or shapes differ, that is, the checkpoint belongs to another model or
        optimizer; nothing is assigned then.
    """
    difference = _difference(checkpoint, variables)
    if difference:
        started = "the flags and data it was started with"
        if "optimizer" not in checkpoint.meta:  # of `fit`
            started = "the model and optimizer it was started with, or give another folder"
        raise UserError(f"{checkpoint.path} is of another run: {difference}; resume with {started}")
    for name, variable in variables.items():
        variable.assign(checkpoint.arrays[name])


def _difference(checkpoint: Checkpoint, variables: Mapping[str, keras.Variable]) -> str:
    """Returns a sentence on the first thing that a checkpoint and a run do not share; "" if all
    fits.
    """
    odd = sorted(
        set(checkpoint.arrays) ^ set(variables),
        key=lambda name: (not name.startswith("model/"), name),
    )
    if odd and odd[0].startswith("model/"):
        return f"the networks differ, first in layer {_layer(odd[0], variables)}"
    if odd:
        if "optimizer" not in checkpoint.meta:
            return "its optimizer keeps other values, or accumulates gradients otherwise"
        optimizer = checkpoint.meta["optimizer"]
        return (
            f"it was written with --optimizer={optimizer}, or another --ema_decay, which keep other"
            " values"
        )
    for name, variable in variables.items():
        before, now = checkpoint.arrays[name].shape, tuple(variable.shape)
        if before != now:
            shapes = (" x ".join(map(str, shape)) or "a number" for shape in (before, now))
            classes = checkpoint.meta.get("num_classes")
            known = f" (it has {classes} classes)" if classes else ""
            return (
                f"layer {_layer(name, variables)} has weights of {' there, '.join(shapes)}"
                f" here{known}"
            )
    return ""


def _layer(name: str, variables: Mapping[str, keras.Variable]) -> str:
    """Returns the layer of a variable: `model/0007/stem/kernel` belongs to `stem`."""
    path = variables[name].path if name in variables else name.split("/", 2)[-1]
    return path.rpartition("/")[0] or path


def described(order: SampleOrder) -> dict[str, int]:
    """Returns what a checkpoint tells of the order of examples, beside the data that are in
    order.
    """
    return {"seed": order.seed, "shuffle_window": order.window}


def check_position(checkpoint: Checkpoint, order: SampleOrder) -> None:
    """Compares the order of the epoch in which a run stands with that of the examples now.

    Raises:
      UserError: inside of an epoch, if --seed or --shuffle_window would give some examples twice
        and others not at all.
    """
    offset, epoch = (checkpoint.meta["state"]["cursor"][name] for name in ("offset", "epoch"))
    before, now = checkpoint.meta["order"], described(order)
    for name in now if offset else ():
        if before[name] != now[name]:
            raise UserError(
                f"--{name}={now[name]}: the run stands inside of epoch {epoch + 1}, whose order has"
                f" --{name}={before[name]}; resume with that, or change it at the end of an epoch"
            )
