"""Holds the position of a run and restores it from a checkpoint, together with the variables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder

if TYPE_CHECKING:
    import keras

# Why `fit` has other variables than a checkpoint, by the first part of their names.
_REASONS_IN_FIT = {
    "random": "the models have other random layers, such as Dropout",
    "average": "only one of the two runs averages the weights",
}
_OTHER_REASON_IN_FIT = "its optimizer has other variables, or accumulates gradients differently"

# The beginning of the names that `array_name` returns. Callbacks may have names of another form.
_PART_AND_NUMBER = re.compile(r"[^/]+/[0-9]{4}(?=/|$)")


@dataclasses.dataclass
class RunState:
    """Holds the position of a run, which is the same on every rank.

    Attributes:
      cursor: The next example to read.
      step: Optimizer steps done, including skipped ones.
      images: Training images processed by all ranks.
      finished_epochs: Epochs that were trained and validated. Less than `cursor.epoch` between the
        last step of an epoch and the end of its validation.
      recorded_at: Fractional epochs done when the latest epoch record was written. A record is
        written at the end of an epoch, and within one after a validation or at the end of the run.
      seconds: Wall time of this and all earlier sessions up to the latest record, in seconds.
      best_top1: The best validation top-1 accuracy so far, a fraction.
      best_epoch: Epochs that were done when `best_top1` was first reached, fractional within an
        epoch; 0 before the first validation.
      schedule_values: The schedule's values of the last step; empty before the first step.
      stop: Why the loop ends early: "", "preempted", "target", or the word that a callback passed
        to `Run.request_stop`.
    """

    cursor: Cursor = dataclasses.field(default_factory=lambda: Cursor(0, 0))
    step: int = 0
    images: int = 0
    finished_epochs: int = 0
    recorded_at: float = 0.0
    seconds: float = 0.0
    best_top1: float = 0.0
    best_epoch: float = 0
    schedule_values: dict[str, float] = dataclasses.field(default_factory=dict)
    stop: str = ""

    def has_reached(self, target: float | None) -> bool:
        """Returns whether a validation has reached an accuracy; no one reaches None."""
        return target is not None and bool(self.best_epoch) and self.best_top1 >= target

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form without `stop`, which belongs to one session only."""
        values = dataclasses.asdict(self)
        del values["stop"]
        return values

    def restore(self, values: dict[str, Any]) -> None:
        """Sets all fields from the result of `to_dict`.

        The object itself is changed, because all components of a run share it.
        """
        vars(self).update(vars(RunState.from_dict(values)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverts `to_dict`.

        Raises:
          KeyError: If the cursor is missing or incomplete.
          TypeError: If there are unknown fields.
        """
        fields = {**values}
        fields["cursor"] = Cursor(values["cursor"]["epoch"], values["cursor"]["offset"])
        return cls(**fields)


def array_name(part: str, number: int, path: str) -> str:
    """Returns the name of a variable's array in a checkpoint, such as `model/0007/stem/kernel`.

    Args:
      part: The owner of the variable, such as "model" or "optimizer".
      number: Number of the variable among those of its owner, from 0.
      path: Path of the variable in Keras.
    """
    return f"{part}/{number:04d}/{path}"


def restore_arrays(checkpoint: CheckpointArchive, variables: Mapping[str, keras.Variable]) -> None:
    """Assigns every array of a checkpoint to the variable with its name.

    `array_name` describes the form of the names. In a checkpoint of `fit` the path is only for
    readers, and the number decides. Keras counts up the names of layers when a process builds a
    model twice, so the same variable may have another path.

    Raises:
      UserError: If names or shapes differ, because the checkpoint belongs to another model or
        optimizer. No variable is changed then.
    """
    if _written_by_fit(checkpoint):
        arrays = {without_path(name): array for name, array in checkpoint.arrays.items()}
        checkpoint = dataclasses.replace(checkpoint, arrays=arrays)
        variables = {without_path(name): variable for name, variable in variables.items()}
    difference = _first_difference(checkpoint, variables)
    if difference:
        remedy = "Resume with the flags and data that the run was started with."
        if _written_by_fit(checkpoint):
            remedy = (
                "Resume with the model and optimizer that the run was started with, or pass another"
                " directory."
            )
        raise UserError(f"{checkpoint.path} belongs to another run: {difference}. {remedy}")
    for name, variable in variables.items():
        variable.assign(checkpoint.arrays[name])


def _first_difference(
    checkpoint: CheckpointArchive, variables: Mapping[str, keras.Variable]
) -> str:
    """Returns a clause about the first difference between a checkpoint and a run, or ""."""
    # Variables of the model come first: a different network explains all other differences.
    unmatched_names = sorted(
        set(checkpoint.arrays) ^ set(variables),
        key=lambda name: (not name.startswith("model/"), name),
    )
    if unmatched_names and unmatched_names[0].startswith("model/"):
        return f"the networks differ, first in layer {_layer(unmatched_names[0], variables)}"
    if unmatched_names:
        name = unmatched_names[0]
        if not _PART_AND_NUMBER.match(name):
            owner = "the checkpoint" if name in checkpoint.arrays else "this run"
            return f"only {owner} has {name}, a variable of a callback"
        if _written_by_fit(checkpoint):
            return _REASONS_IN_FIT.get(name.partition("/")[0], _OTHER_REASON_IN_FIT)
        optimizer = checkpoint.meta["optimizer"]
        return (
            f"it was written with --optimizer={optimizer} or another --ema_decay, which have other"
            " variables"
        )
    for name, variable in variables.items():
        stored_shape = checkpoint.arrays[name].shape
        shape = tuple(variable.shape)
        if stored_shape != shape:
            classes = checkpoint.meta.get("num_classes")
            classes_note = f" (it has {classes} classes)" if classes else ""
            return (
                f"layer {_layer(name, variables)} has weights of {_shape_text(stored_shape)} there,"
                f" {_shape_text(shape)} here{classes_note}"
            )
    return ""


def _written_by_fit(checkpoint: CheckpointArchive) -> bool:
    """Returns whether Keras's `fit` wrote a checkpoint, and not the program."""
    return "optimizer" not in checkpoint.meta


def without_path(name: str) -> str:
    """Returns `model/0007` for `model/0007/stem/kernel`, and names of another form unchanged."""
    match = _PART_AND_NUMBER.match(name)
    return match[0] if match else name


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _layer(name: str, variables: Mapping[str, keras.Variable]) -> str:
    """Returns the layer of a variable: `model/0007/stem/kernel` belongs to `stem`."""
    path = variables[name].path if name in variables else name.split("/", 2)[-1]
    return path.rpartition("/")[0] or path


def describe_order(order: SampleOrder) -> dict[str, int]:
    """Returns the settings of the example order that a checkpoint stores."""
    return {"seed": order.seed, "shuffle_window": order.window}


def check_epoch_order(checkpoint: CheckpointArchive, order: SampleOrder) -> None:
    """Checks that the epoch in which a run was interrupted continues in the same order.

    Raises:
      UserError: Within an epoch, if --seed or --shuffle_window has changed, because some examples
        would be used twice and others not at all.
    """
    cursor = checkpoint.meta["state"]["cursor"]
    if not cursor["offset"]:
        return
    stored_order = checkpoint.meta["order"]
    for name, value in describe_order(order).items():
        if stored_order[name] != value:
            raise UserError(
                f"--{name}={value}: the run was interrupted within epoch {cursor['epoch'] + 1},"
                f" which it began with --{name}={stored_order[name]}. Resume with that value, or"
                " change it at the end of an epoch."
            )
