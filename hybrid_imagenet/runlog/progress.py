"""Computes from the records what the views show; independent of terminals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.optimizers import registry
from hybrid_imagenet.runlog.summary import (
    format_accuracy,
    format_epochs,
    format_percent,
    is_top5_meaningful,
    throughput_without_compilation,
)

# A run that waits for input longer than this fraction of the time shows it.
_INPUT_BOUND_FRACTION = 0.1


class RunStatus:
    """Progress and results of a run, from its records.

    Attributes:
      info: See `__init__`.
      total_epochs: Planned number of epochs.
      ends_at: Fractional epochs after which the run stops.
      values: Latest value of each key in any record.
      epoch: Current epoch, counted from 1.
      position: Fractional epochs done.
      steps_done: Number of steps done.
    """

    def __init__(self, info: Mapping[str, Any], total_epochs: float):
        """Begins with what is known before the first record.

        Args:
          info: Any of `ends_at` (fractional epochs, if the run stops before the last epoch),
            `images_per_epoch`, `world_size`, `step`, `epochs` and `validated` (done before this
            session; the last has pairs of an epoch and its top-1), `gpus` (false if ranks do not
            have GPUs), `single_gpu_images_per_second`, `target` (a top-1 fraction), `num_classes`,
            `optimizer` (default: hybrid).
          total_epochs: Planned number of epochs.
        """
        self.info = dict(info)
        self.total_epochs = total_epochs
        self.ends_at = float(info.get("ends_at") or total_epochs)
        self.values: dict[str, Any] = {}
        self.position = float(info.get("epochs") or 0)
        self.epoch = min(int(self.position) + 1, math.ceil(total_epochs))
        self.steps_done = int(info.get("step") or 0)
        # Images per second, without the start of a session, in which the step is compiled.
        self._rate: float | None = None
        self._epochs_in_session = 0
        # The shortest validation, because the first one includes compilation.
        self._validation_seconds: float | None = None
        self._target_epoch: float | None = None
        for epoch, top1 in info.get("validated") or ():
            self._validation_done(epoch, top1)

    def advance(self, step: int, position: float) -> None:
        """Records that a step is done.

        Args:
          step: Number of steps done.
          position: Fractional epochs done.
        """
        self.steps_done = step
        self.position = min(position, float(self.total_epochs))
        self.epoch = min(int(self.position) + 1, math.ceil(self.total_epochs))

    def step(self, record: Mapping[str, Any]) -> None:
        self.values.update(record)
        self._rate = record.get("images_per_second") or self._rate
        self.advance(record["step"], record["position"])
        self.epoch = int(record["epoch"])

    def epoch_done(self, record: Mapping[str, Any]) -> None:
        self.values.update(record)
        if self._epochs_in_session or self._rate is None:
            self._rate = throughput_without_compilation(record) or self._rate
        self._epochs_in_session += 1
        seconds = record.get("validation_seconds")
        if seconds is not None:
            seconds -= record.get("validation_start_seconds") or 0.0
            if self._validation_seconds is None or seconds < self._validation_seconds:
                self._validation_seconds = seconds
        self.epoch = math.ceil(record["epoch"])
        self.position = float(record["epoch"])
        self.steps_done = record.get("step", self.steps_done)
        if record.get("val_top1") is not None:
            self._validation_done(record["epoch"], record["val_top1"])

    def _validation_done(self, epoch: float, top1: float) -> None:
        target = self.info.get("target")
        if self._target_epoch is None and target is not None and top1 >= target:
            self._target_epoch = epoch

    @property
    def top5(self) -> bool:
        """Whether the run has enough classes for top-5 accuracy to be meaningful."""
        return is_top5_meaningful(self.info.get("num_classes"))

    @property
    def epoch_fraction(self) -> float:
        """Fraction of the current epoch that is done, 0 to 1."""
        return min(max(self.position - (self.epoch - 1), 0.0), 1.0)

    def remaining_seconds(self) -> float | None:
        """Returns the seconds until the last epoch is done, including validation.

        It is None if the rate is unknown.
        """
        images = self.info.get("images_per_epoch")
        if not images or not self._rate:
            return None
        seconds_per_epoch = float(images / self._rate + (self._validation_seconds or 0.0))
        return seconds_per_epoch * max(self.ends_at - self.position, 0.0)

    def efficiency(self) -> float | None:
        """Returns the scaling efficiency, or None if the speed of one GPU alone is unknown."""
        single_gpu_rate = self.info.get("single_gpu_images_per_second")
        rate = self.values.get("images_per_second")
        if not single_gpu_rate or not rate:
            return None
        return float(rate / (single_gpu_rate * self.info["world_size"]))

    def target_text(self) -> str | None:
        """Returns the target and the epoch that reached it, or None before."""
        if self._target_epoch is None:
            return None
        target = format_accuracy(self.info["target"])
        return f"reached target {target} in epoch {format_epochs(self._target_epoch)}"

    def rate_text(self) -> str | None:
        """Returns images per second, in total and per GPU or rank, and scaling efficiency."""
        rate = self.values.get("images_per_second")
        if not rate:
            return None
        size = int(self.info.get("world_size", 1))
        text = f"{_format_rate(rate)} images/s"
        if size == 1:
            return text
        text += f" ({rate / size:,.1f} per {'GPU' if self.info.get('gpus', True) else 'rank'})"
        efficiency = self.efficiency()
        if efficiency is not None:
            text += f", efficiency {100 * efficiency:.1f} %"
        return text

    def notes_before(self) -> dict[str, str]:
        """Returns notes to print above the first row that they apply to: the update rule."""
        rule = self._update_rule()
        return {"phase": f"phase: {rule}"} if rule else {}

    def notes_after(self) -> dict[str, str]:
        """Returns notes to print below the row that caused them: target and trouble."""
        notes = {"target": self.target_text(), "trouble": self.trouble_text()}
        return {name: text for name, text in notes.items() if text}

    def _update_rule(self) -> str | None:
        """Returns the update rule, if the optimizer has several and the phase is known."""
        phase = self.values.get("phase")
        optimizer = self.info.get("optimizer", "hybrid")
        if phase is None or not registry.OPTIMIZERS[optimizer].bounded_warmup:
            return None
        return registry.rule(optimizer, phase)

    def phase_text(self) -> str | None:
        """Returns phase, learning rate and, with AdaBound, both bounds."""
        values = self.values
        if values.get("learning_rate") is None:
            return None
        text = f"learning rate {values['learning_rate']:.4g}"
        rule = self._update_rule()
        if rule:
            text = f"{rule}, {text}"
        if values.get("phase") == 0 and values.get("lower_bound") is not None:
            upper_bound = values.get("upper_bound")
            upper_text = "infinity" if upper_bound is None else f"{upper_bound:.4g}"
            text += f", bounds {values['lower_bound']:.4g} to {upper_text}"
        return text

    def trouble_text(self) -> str | None:
        """Returns how long training waited for input, and skipped steps; None without them."""
        troubles = []
        wait_fraction = self.values.get("data_wait_fraction")
        if wait_fraction is not None and wait_fraction >= _INPUT_BOUND_FRACTION:
            troubles.append(f"waiting for data {100 * wait_fraction:.0f} % of the time")
        if self.values.get("skipped_steps"):
            troubles.append(f"{pluralize(self.values['skipped_steps'], 'step')} skipped")
        return ", ".join(troubles) or None


# Names and widths. All columns with narrow separators fit into a terminal with 80 columns.
_COLUMNS = (
    ("epoch", 9),
    ("train loss", 10),
    ("train top-1", 11),
    ("val loss", 8),
    ("val top-1", 9),
    ("val top-5", 9),
    ("images/s", 8),
    ("ETA", 8),
)
# Without a line, the names of neighboring columns would read as one, because they contain spaces.
_SEPARATOR = " | "
_NARROW_SEPARATOR = "|"


class EpochTable:
    """Formats records as rows of a table."""

    def __init__(self, status: RunStatus, max_width: int | None = None):
        """Chooses the columns and their separator.

        Args:
          status: Status of the run.
          max_width: Characters of a line; None for no limit. At least 80 are needed.
        """
        self._status = status
        self._columns = [
            (name, width) for name, width in _COLUMNS if status.top5 or name != "val top-5"
        ]
        self._separator = _SEPARATOR
        if max_width is not None and len(self.header()) > max_width:
            self._separator = _NARROW_SEPARATOR

    def header(self) -> str:
        """Returns the names of the columns."""
        return self._line({name: name for name, _ in self._columns})

    def row(self, record: Mapping[str, Any]) -> str:
        """Returns the row of a step or epoch record.

        The row of a step has a fractional epoch and no validation.
        """
        status = self._status
        is_epoch = record.get("kind") == "epoch"
        done = format_epochs(record["epoch"]) if is_epoch else f"{status.position:.2f}"
        cells = {"epoch": f"{done}/{format_epochs(status.total_epochs)}"}
        for split in ("train", "val"):
            for name, text in accuracy_texts(record, split):
                cells[f"{split} {name}"] = text
        rate = record.get("images_per_second")
        if rate:
            cells["images/s"] = _format_rate(rate)
        remaining = status.remaining_seconds()
        if remaining:
            cells["ETA"] = format_remaining_time(remaining)
        return self._line(cells)

    def _line(self, cells: Mapping[str, str]) -> str:
        columns = [f"{cells.get(name, ''):>{width}}" for name, width in self._columns]
        return self._separator.join(columns).rstrip()


def accuracy_texts(
    record: Mapping[str, Any], split: str, *, top5: bool = True
) -> list[tuple[str, str]]:
    """Returns name and text of loss, top-1 and top-5, as far as they are known.

    Args:
      record: A step or epoch record.
      split: `train` or `val`. Top-5 is only returned for `val`.
      top5: Whether to return top-5.
    """
    texts = []
    loss = record.get(f"{split}_loss")
    if loss is not None:
        texts.append(("loss", f"{loss:.4f}"))
    top1_fraction = record.get(f"{split}_top1")
    if top1_fraction is not None:
        texts.append(("top-1", format_percent(top1_fraction)))
    top5_fraction = record.get(f"{split}_top5")
    if top5_fraction is not None and top5 and split == "val":
        texts.append(("top-5", format_percent(top5_fraction)))
    return texts


def format_remaining_time(seconds: float) -> str:
    """Formats seconds as 0:45, 12:05, 3:07:00 or 4 d 03 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days >= 2:
        return f"{days} d {hours_of_day:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _format_rate(images_per_second: float) -> str:
    if images_per_second >= 100:
        return f"{images_per_second:,.0f}"
    return f"{images_per_second:.1f}"
