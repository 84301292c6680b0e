"""Writes and reads `metrics.jsonl`, the source of every other log and report.

Each line is a JSON object, a record. Its key `kind` is `step` (every --log_every_steps steps),
`epoch` (once per pass over the training set, with the results of validation if there was one),
`diverged` (training diverged at this step, and ended) or `failed` (an error ended training). Values
that are not finite are written as null, because JSON cannot represent them.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import json_fields
from hybrid_imagenet.runlog.json_fields import FieldType

# Warnings name only so many of the lines that are not records.
_MAX_NAMED_LINES = 3
_MAX_SHOWN_CHARACTERS = 80
# Summaries list the epochs without a record. A damaged number of epochs must not make that list
# endless.
_MAX_EPOCHS = 1_000_000

KEYS: Mapping[str, str] = {
    "kind": "`step`, `epoch`, `diverged` or `failed`",
    "epoch": (
        "epoch records: number of epochs that are done, such as 0.5 within an epoch; step records:"
        " the current epoch, from 1"
    ),
    "step": "steps done since the start of the run",
    "position": "fractional epochs done",
    "seconds": (
        "seconds of training and validation over all sessions; time whose work was lost in a crash"
        " is not included"
    ),
    "train_loss": (
        "mean training loss in nats; in an epoch record of all ranks since the last epoch record,"
        " in a step record of rank 0 since the last record; weighted by class with"
        " `--class_weights`"
    ),
    "train_top1": (
        "fraction of training images whose first guess was right; for mixed images"
        " (`--mixup_alpha`, `--cutmix_alpha`), that of the label with the larger weight"
    ),
    "train_top5": "fraction of training images whose class was among the first five guesses",
    "val_loss": "mean validation loss in nats",
    "val_top1": "validation top-1 accuracy as a fraction",
    "val_top5": "validation top-5 accuracy as a fraction",
    "val_count": "number of validation images that were counted",
    "val_dropped": (
        "number of validation images that were not counted because their records are bad"
    ),
    "val_split": (
        "which images were validated: `validation`, or `tuning` for the training images that"
        " `--tuning_split` sets aside"
    ),
    "train_count": "number of training images of the epoch that all ranks used",
    "train_dropped": (
        "number of training images of the epoch that were replaced because their records are bad"
    ),
    "images_per_second": (
        "training images of all GPUs per second, without validation; absent if the only step is the"
        " one that was compiled"
    ),
    "train_seconds": "seconds spent in the epoch's training steps",
    "step_seconds": "mean seconds per step",
    "validation_seconds": "seconds spent in validation",
    "train_start_seconds": (
        "seconds of `train_seconds` in the first step, which is compiled (first epoch of a session)"
    ),
    "validation_start_seconds": (
        "seconds of `validation_seconds` for compilation (first validation of a session)"
    ),
    "checkpoint_seconds": "seconds for which training waited for a checkpoint",
    "data_wait_fraction": "fraction of the training time in which rank 0 waited for input",
    "communication_seconds": (
        "seconds per step of communication that did not overlap with computation"
    ),
    "slowest_rank_seconds": (
        "seconds per step for which the average rank waited for the slowest one"
    ),
    "slowest_rank": "rank for which the others waited longest in the epoch",
    "bytes_read": "bytes of training data that all ranks read since the last record",
    "reads": "read operations of all ranks since the last record",
    "bad_records": "bad training records in this session, each counted once over all ranks",
    "global_batch": "images per step over all GPUs",
    "per_gpu_batch": (
        "images per GPU and micro-batch, over which batch normalization computes its statistics"
    ),
    "accumulation": "micro-batches per step",
    "image_size": "side of the training images in pixels",
    "learning_rate": "learning rate of the last step",
    "momentum": "momentum of the last step",
    "phase": "0 in the AdaBound-bounded warmup of hybrid, 1 after it and for the other optimizers",
    "lower_bound": "AdaBound's lower bound Bl",
    "upper_bound": "AdaBound's upper bound Bu",
    "trust_ratio_exponent": (
        "exponent s of the trust ratio while LARS is ramped up after T: a layer's learning rate is"
        " learning rate * ratio^s"
    ),
    "loss_scale": "factor on the loss before backpropagation",
    "skipped_steps": (
        "steps skipped because of gradients that were not finite, since the start of the run"
    ),
    "grad_norm": "Euclidean norm of the averaged, unscaled gradient, before clipping",
    "trust_ratios": "LARS trust ratio by layer",
    "relative_updates": (
        "norm of the update divided by the norm of the weights, by layer, in the last step of an"
        " epoch"
    ),
    "error": "the error that ended training, in a record of kind `failed`",
}
"""The meaning of each key.

A record may have other keys too; readers ignore unknown keys.
"""


class MetricsWriter:
    """Appends records to metrics.jsonl.

    When `write` returns, a record was passed to the operating system, and the record of an epoch is
    on the disk.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume_from: tuple[int, float] | None = None
    ):
        """Opens the file for appending, and creates it if it does not exist.

        Args:
          path: The file.
          resume_from: Number of steps, and number of epochs with a record, in the restored
            checkpoint. Later records are removed first, because they will be written again. None
            keeps every record. Lines that are not records are always moved to a separate file,
            with a warning.

        Raises:
          UserError: If the file cannot be read or written.
        """
        self.path = pathlib.Path(path)
        try:
            if self.path.is_file():
                _repair(self.path, resume_from)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}. Check the path, its permissions"
                " and the free space."
            ) from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record.

        Raises:
          UserError: If the file was deleted or cannot be written.
        """
        try:
            self._file.write(json.dumps(to_json_types(record), allow_nan=False) + "\n")
            self._file.flush()
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise UserError(
                    f"{self.path} was deleted during the run, so records can no longer be stored."
                    " Start the run again."
                )
            if record["kind"] == "epoch":
                os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}. Earlier records are intact."
                " Continue with --resume."
            ) from None

    def close(self) -> None:
        self._file.close()


def read_records(
    path: str | os.PathLike[str], *, max_bytes: int | None = None
) -> list[dict[str, Any]]:
    """Reads the records of a file that may still be growing.

    An incomplete last line is skipped. A complete last line that is not a record, such as one that
    another program appended, is skipped with a warning.

    Args:
      path: The file.
      max_bytes: Size above which the file is rejected; None for no limit.

    Raises:
      UserError: If the file does not exist, is not a regular file or too large, if a line before
        the last is not a JSON object, or if the value of one of `KEYS` is of a wrong type.
    """
    path = pathlib.Path(path)
    lines = _read_lines(path, max_bytes)
    for line in lines:
        if line.record is None and line is lines[-1]:
            print(f"warning: {path}, line {line.number}: {line.error}; skipped", file=sys.stderr)
        elif line.error:
            raise UserError(f"{path}, line {line.number}: {line.error}. {line.remedy}")
    return [line.record for line in lines if line.record is not None]


def to_json_types(value: Any) -> Any:
    """Converts a value to types that JSON has.

    NumPy scalars and arrays become numbers and lists. Numbers that are not finite become None.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_types(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json_types(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class _Line(NamedTuple):
    """A line of a file.

    Attributes:
      number: Counted from 1.
      content: Its bytes, without the newline.
      record: The record in it; None if it is not a JSON object.
      error: What is wrong with the line or with a value in it; "" if nothing is.
      remedy: A sentence; "" without an error.
    """

    number: int
    content: bytes
    record: dict[str, Any] | None
    error: str = ""
    remedy: str = ""


def _read_lines(path: pathlib.Path, max_bytes: int | None = None) -> list[_Line]:
    """Returns the lines of a file, without empty ones and an incomplete last one.

    Raises:
      UserError: If the file cannot be read, or is larger than `max_bytes`.
    """
    try:
        contents = files.read_run_file(path, max_bytes).split(b"\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. Check the path and its permissions."
        ) from None
    lines = []
    for number, content in enumerate(contents, 1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            # The last line lacks its newline if the writer was killed while it wrote.
            is_complete = number < len(contents)
            if is_complete:
                lines.append(_Line(number, content, None, "not a JSON object", "Remove the line."))
            continue
        record_error = _record_error(record)
        if record_error:
            remedy = "Correct or remove the line."
            lines.append(_Line(number, content, record, record_error, remedy))
        else:
            lines.append(_Line(number, content, record))
    return lines


def _record_error(record: Mapping[str, Any]) -> str:
    """Returns which value of a record is of a wrong type, or "" if all are valid.

    Only values with which reports calculate are checked.
    """
    is_epoch = record.get("kind") == "epoch"
    if is_epoch and record.get("epoch") is None:
        return "the record of an epoch without its number"
    for key in KEYS.keys() & record.keys():
        value = record[key]
        if key == "epoch" and is_epoch:
            field_type = _EPOCHS_DONE
        else:
            field_type = _FIELD_TYPES.get(key, _FINITE_NUMBER)
        if value is None and field_type.null:
            continue
        if not field_type.accepts(value):
            return f"{key} is {json.dumps(value)[:_MAX_SHOWN_CHARACTERS]}, not {field_type.name}"
    return ""


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    # Also false for NaN, and for an integer of hundreds of digits, which no float can represent.
    return abs(value) <= sys.float_info.max


def _is_finite_or_null(value: Any) -> bool:
    # The trust ratio of a layer whose weights are 0 is null.
    return value is None or _is_finite(value)


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


# A value that was not finite is written as null, so most keys accept null.
_FINITE_NUMBER = FieldType("a number", _is_finite)
_EPOCHS_DONE = FieldType(
    f"a number from 0 to {_MAX_EPOCHS:,}",
    lambda value: _is_finite(value) and 0 <= value <= _MAX_EPOCHS,
    null=False,
)
_NUMBERS_BY_LAYER = FieldType("numbers by layer", json_fields.object_of(_is_finite_or_null))
# The keys that are not numbers, or must not be null.
_FIELD_TYPES = {
    "kind": FieldType("a text", json_fields.is_text, null=False),
    "val_split": FieldType("a text", json_fields.is_text),
    "error": FieldType("a text", json_fields.is_text),
    "trust_ratios": _NUMBERS_BY_LAYER,
    "relative_updates": _NUMBERS_BY_LAYER,
    "step": FieldType("a whole number", _is_step, null=False),
    "epoch": FieldType("a whole number", _is_step, null=False),
}


def _repair(path: pathlib.Path, resume_from: tuple[int, float] | None) -> None:
    """Removes what a continued run must not keep.

    These are an incomplete last line, the records after `resume_from`, and lines that are not
    records. The latter are named and moved to a separate file, because another program or a person
    wrote them. The old file stays until the new one is complete.
    """
    lines = _read_lines(path)
    invalid_lines = [line for line in lines if line.error]
    kept_records = []
    for line in lines:
        if line.record is None or line.error:
            continue
        if resume_from is None or not _is_later(line.record, *resume_from):
            kept_records.append(line.record)
    ends_with_newline = path.read_bytes()[-1:] in (b"\n", b"")
    if len(kept_records) == len(lines) and ends_with_newline:
        return
    if invalid_lines:
        _move_lines(path, invalid_lines)
    with files.atomic_replace(path) as temporary:
        text = "".join(json.dumps(record) + "\n" for record in kept_records)
        temporary.write_text(text, encoding="utf-8")


def _move_lines(path: pathlib.Path, lines: Sequence[_Line]) -> None:
    """Appends lines to a file next to `path`, and prints a warning about the first of them."""
    target = path.with_name(f"{path.name}.removed")
    with target.open("ab") as file:
        file.write(b"".join(line.content + b"\n" for line in lines))
    for line in lines[:_MAX_NAMED_LINES]:
        print(
            f"warning: {path}, line {line.number}: {line.error}; moved to {target.name}",
            file=sys.stderr,
        )
    if len(lines) > _MAX_NAMED_LINES:
        print(
            f"warning: {path}: {len(lines) - _MAX_NAMED_LINES} more such lines moved",
            file=sys.stderr,
        )


def _is_later(record: Mapping[str, Any], step: int, epochs: float) -> bool:
    """Returns whether a record was written after a checkpoint.

    Args:
      record: Record of any kind. A continued run has not failed, so it does not keep that record.
      step: Number of steps in the checkpoint.
      epochs: Number of epochs with a record in the checkpoint. The record of an epoch may be
        missing although its last step was done, because validation comes between them.
    """
    if record.get("kind") == "failed" or (record.get("step") or 0) > step:
        return True
    return record.get("kind") == "epoch" and (record.get("epoch") or 0) > epochs
