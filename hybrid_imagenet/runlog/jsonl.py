"""Writes and reads `metrics.jsonl`: one JSON object per line, from which every other log and report
is made.

A record has the key `kind`: `step` (every --log_every_steps steps), `epoch` (one per pass over the
training set, with the validation's results when there was one), or `diverged` (training was found
to have diverged at this step, and ended). Values that are not finite are written as null, as JSON
has no word for them.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError

# At most as many lines that are not records are named.
_MAX_NAMED_LINES = 3

KEYS: Mapping[str, str] = {
    "kind": "`step`, `epoch` or `diverged`",
    "epoch": (
        "epochs done (epoch records; 0.5 inside an epoch), or the epoch under way, from 1 (step"
        " records)"
    ),
    "step": "steps done since the start of the run",
    "position": "fractional epochs done",
    "seconds": "seconds of training and validation, over all sessions, without what a kill undid",
    "train_loss": (
        "mean training loss in nats since the last epoch record, or on rank 0 since the last step"
        " record"
    ),
    "train_top1": "fraction of training images whose first guess was right",
    "train_top5": "fraction of training images whose class was among five guesses",
    "val_loss": "mean validation loss in nats",
    "val_top1": "validation top-1 accuracy, a fraction",
    "val_top5": "validation top-5 accuracy, a fraction",
    "val_count": "validation images counted",
    "val_dropped": "validation images not counted: bad records",
    "val_split": (
        "what was validated: `validation`, or `tuning`, the training images that `--tuning_split`"
        " keeps apart"
    ),
    "train_count": "training images of the epoch that were used, all ranks",
    "train_dropped": "training images of the epoch that others replaced: bad records",
    "images_per_second": (
        "training images of all GPUs per second, without validation; absent where the only step was"
        " compiled"
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
    "communication_seconds": "seconds per step of communication that computation did not hide",
    "slowest_rank_seconds": "seconds per step for which the mean rank waited for the slowest",
    "slowest_rank": "rank for which the others waited most in the epoch",
    "bytes_read": "bytes of training data read since the last record, all ranks",
    "reads": "read operations since the last record, all ranks",
    "bad_records": "training records found bad in this session, once over all ranks",
    "global_batch": "images per step over all GPUs",
    "per_gpu_batch": "images per GPU and micro-batch: what batch normalization sees",
    "accumulation": "micro-batches per step",
    "image_size": "side of the training images in pixels",
    "learning_rate": "learning rate of the last step",
    "relative_step": "relative step of LARS or LAMB (docs/methods.md) at the last step",
    "momentum": "momentum of the last step",
    "phase": "0 in the AdaBound-bounded warmup of hybrid, 1 after it and for the other optimizers",
    "lower_bound": "AdaBound's lower bound Bl",
    "upper_bound": "AdaBound's upper bound Bu",
    "lars_share": (
        "share s of LARS while it is blended in after T: a layer's learning rate is learning rate *"
        " ratio^s"
    ),
    "loss_scale": "factor on the loss before backpropagation",
    "skipped_steps": "steps skipped for non-finite gradients since the start of the run",
    "grad_norm": "Euclidean norm of the averaged, unscaled gradient",
    "trust_ratios": "LARS trust ratio by layer",
    "relative_updates": (
        "norm of the update divided by the norm of the weights, by layer, in the last step of an"
        " epoch"
    ),
}
"""What each key means. A record may hold other keys too; readers pass over those that they do not
know.
"""


# Summaries list the epochs that have no record. A damaged number of epochs must not make that list
# endless.
_MAX_EPOCHS = 1_000_000


def to_json_types(value: Any) -> Any:
    """Returns the value in the types that JSON has: NumPy scalars become numbers, what is not
    finite becomes None.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_types(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return to_json_types(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricsWriter:
    """Appends records; each is on its way to the disk when `write` returns, and an epoch's is on
    it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume_from: tuple[int, float] | None = None
    ):
        """Opens the file for appending; creates it where there is none.

        Args:
          path: the file.
          resume_from: the steps and the epochs with a record that the restored checkpoint holds.
            Records of later ones are removed first, as they are going to be written again. None
            keeps every record. Lines that are not records are moved to a separate file in any case,
            with a warning.

        Raises:
          UserError: if the file cannot be read or written.
        """
        self.path = pathlib.Path(path)
        try:
            if self.path.is_file():
                _mend(self.path, resume_from)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record.

        Raises:
          UserError: if the disk does not take it.
        """
        try:
            self._file.write(json.dumps(to_json_types(record), allow_nan=False) + "\n")
            self._file.flush()
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise UserError(
                    f"{self.path} was deleted during the run: nothing more can be recorded; start"
                    " again"
                )
            if record["kind"] == "epoch":
                os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; earlier records are intact, --resume"
                " continues"
            ) from None

    def close(self) -> None:
        self._file.close()


class _Line(NamedTuple):
    """A line of a file: its number from 1, its bytes without the newline, and its record, or what
    is wrong with it.
    """

    number: int
    content: bytes
    record: dict[str, Any] | None
    error: str


def read_records(
    path: str | os.PathLike[str], *, max_bytes: int | None = None
) -> list[dict[str, Any]]:
    """Reads the records of a file that may still be growing.

    A torn last line is skipped. So is a whole last line that is not a record, such as one that
    another program has appended, with a warning.

    Args:
      path: the file.
      max_bytes: size above which the file is rejected; None for no limit.

    Raises:
      UserError: if there is no such file, it is not a regular file or too large, or if a line
        before the last is not a JSON object, or the value of one of `KEYS` is not what it must be.
    """
    path = pathlib.Path(path)
    lines = _lines(path, max_bytes)
    for line in lines:
        if line.record is None and line is lines[-1]:
            print(
                f"warning: {path}, line {line.number}: not a JSON object; skipped", file=sys.stderr
            )
        elif line.error:
            raise UserError(f"{path}, line {line.number}: {line.error} the line")
    return [line.record for line in lines if line.record is not None]


def _lines(path: pathlib.Path, max_bytes: int | None = None) -> list[_Line]:
    """Returns the lines of a file that are not empty, without a torn last one; arguments as for
    `read`.

    Raises:
      UserError: if the file cannot be read.
    """
    try:
        contents = files.read_run_file(path, max_bytes).split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    lines = []
    for number, content in enumerate(contents, 1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            # The last line has no newline if the writer was cut off in the middle.
            if number < len(contents):
                lines.append(_Line(number, content, None, "not a JSON object; remove"))
            continue
        wrong = _wrong(record)
        lines.append(_Line(number, content, record, f"{wrong}; correct or remove" if wrong else ""))
    return lines


def _wrong(record: Mapping[str, Any]) -> str:
    """Returns which value that reports calculate with is of another kind, and what it should be; ""
    for none.
    """
    if record.get("kind") == "epoch" and record.get("epoch") is None:
        return "the record of an epoch without its number"
    for key in KEYS.keys() & record.keys():
        value = record[key]
        if key in ("kind", "val_split"):
            good, wanted = isinstance(value, str), "a text"
        elif key in ("trust_ratios", "relative_updates"):
            good, wanted = (
                isinstance(value, dict) and all(map(_is_number, value.values())),
                "numbers by layer",
            )
        elif key == "step" or (key == "epoch" and record.get("kind") != "epoch"):
            good, wanted = type(value) is int and 0 <= value < 2**63, "a whole number"
        elif key == "epoch":
            good = _is_number(value) and 0 <= (value or 0) <= _MAX_EPOCHS
            wanted = f"a number from 0 to {_MAX_EPOCHS:,}"
        else:
            good, wanted = _is_number(value), "a number"
        may_be_null = key not in ("kind", "step", "epoch")  # null is a number that was not finite
        if not good and not (may_be_null and value is None):
            return f"{key} is {json.dumps(value)[:80]}, not {wanted}"
    return ""


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number, or nothing, as of a layer whose weights are 0."""
    return value is None or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )


def _mend(path: pathlib.Path, resume_from: tuple[int, float] | None) -> None:
    """Removes what a run that continues must not keep, leaving the old file until the new one is
    complete.

    These are a torn last line, the records after `resume_from`, and lines that are not records. The
    latter are named and moved to a separate file, since another program or a person has written
    them.
    """
    lines = _lines(path)
    foreign = [line for line in lines if line.error]
    records = [line.record for line in lines if line.record is not None and not line.error]
    kept = [
        record for record in records if resume_from is None or not _is_later(record, *resume_from)
    ]
    if len(kept) == len(lines) and path.read_bytes()[-1:] in (b"\n", b""):
        return
    if foreign:
        removed = path.with_name(f"{path.name}.removed")
        with removed.open("ab") as file:
            file.write(b"".join(line.content + b"\n" for line in foreign))
        for line in foreign[:_MAX_NAMED_LINES]:
            reason = line.error.rpartition(";")[0]
            print(
                f"warning: {path}, line {line.number}: {reason}; moved to {removed.name}",
                file=sys.stderr,
            )
        if len(foreign) > _MAX_NAMED_LINES:
            print(
                f"warning: {path}: {len(foreign) - _MAX_NAMED_LINES} more such lines moved",
                file=sys.stderr,
            )
    with files.atomic_replace(path) as temporary:
        temporary.write_text(
            "".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8"
        )


def _is_later(record: Mapping[str, Any], step: int, epochs: float) -> bool:
    """Returns whether a record was written after that position: an epoch ends later than its last
    step.
    """
    not_closed = record.get("kind") == "epoch" and (record.get("epoch") or 0) > epochs
    return bool((record.get("step") or 0) > step or not_closed)
