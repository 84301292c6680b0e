"""Works out from the records what the live view shows; knows nothing of terminals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.optimizers import registry
from hybrid_imagenet.runlog.summary import (
    format_accuracy,
    format_epochs,
    throughput_without_compilation,
)

_FEW, _MANY = 5, 1000  # classes


class RunStatus:
    """Keeps the state of a run as its records tell it.

    Attributes:
      values: the newest value of each key seen in any record.
      epoch: the epoch under way, from 1.
      position: fractional epochs done.
    """

    def __init__(self, info: Mapping[str, Any], total_epochs: float):
        """Takes what is known beforehand.

        Args:
          info: any of `ends_at` (fractional epochs, where the run ends before the last),
            `images_per_epoch`, `world_size`, `step`, `epochs` and `validated` (done before this
            session; the last holds pairs of an epoch and its top-1), `gpus` (false where ranks have
            none), `single_gpu_images_per_second`, `target` (a top-1 fraction), `num_classes`,
            `optimizer` (hybrid if not told).
          total_epochs: planned.
        """
        self.info = dict(info)
        self.total_epochs = total_epochs
        self.ends_at = float(info.get("ends_at") or total_epochs)
        self.values: dict[str, Any] = {}
        self.position = float(info.get("epochs") or 0)
        self.epoch = min(int(self.position) + 1, math.ceil(total_epochs))
        self.steps_done = int(info.get("step") or 0)
        self._rate: float | None = (
            None  # without the start of a session, in which the step is compiled
        )
        self._epochs_here = 0
        self._validation: float | None = None  # the shortest: the first one is compiled
        self._met: float | None = None  # the first epoch that reached the target
        for epoch, top1 in info.get("validated") or ():
            self._validation_done(epoch, top1)

    def advance(self, step: int, position: float) -> None:
        """Notes that a step is done, at a fractional epoch."""
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
        if self._epochs_here or self._rate is None:
            self._rate = throughput_without_compilation(record) or self._rate
        self._epochs_here += 1
        took = record.get("validation_seconds")
        if took is not None:
            took -= record.get("validation_start_seconds") or 0.0
            self._validation = took if self._validation is None else min(took, self._validation)
        self.epoch = math.ceil(record["epoch"])
        self.position = float(record["epoch"])
        self.steps_done = record.get("step", self.steps_done)
        if record.get("val_top1") is not None:
            self._validation_done(record["epoch"], record["val_top1"])

    def _validation_done(self, epoch: float, top1: float) -> None:
        target = self.info.get("target")
        if self._met is None and target is not None and top1 >= target:
            self._met = epoch

    @property
    def top5(self) -> bool:
        """Whether top-5 means anything: among five classes or fewer it is always 100 %."""
        return int(self.info.get("num_classes") or _MANY) > _FEW

    @property
    def epoch_fraction(self) -> float:
        """Fraction of the epoch under way that is done, 0 to 1."""
        return min(max(self.position - (self.epoch - 1), 0.0), 1.0)

    def remaining_seconds(self) -> float | None:
        """Returns the seconds until the last epoch is done, at the present rate and with
        validation.
        """
        images = self.info.get("images_per_epoch")
        if not images or not self._rate:
            return None
        return float(images / self._rate + (self._validation or 0.0)) * max(
            self.ends_at - self.position, 0.0
        )

    def efficiency(self) -> float | None:
        """Returns the scaling efficiency, where the speed of one GPU alone is known."""
        single, rate = (
            self.info.get("single_gpu_images_per_second"),
            self.values.get("images_per_second"),
        )
        return rate / (single * self.info["world_size"]) if single and rate else None

    def target_text(self) -> str | None:
        """Returns the target and the epoch that reached it; None before."""
        if self._met is None:
            return None
        target = format_accuracy(self.info["target"])
        return f"reached target {target} in epoch {format_epochs(self._met)}"

    def rate_text(self) -> str | None:
        """Returns images per second in all, per GPU or rank, and the scaling efficiency."""
        rate = self.values.get("images_per_second")
        if not rate:
            return None
        size, efficiency = int(self.info.get("world_size", 1)), self.efficiency()
        text = f"{rate:,.0f} images/s" if rate >= 100 else f"{rate:.1f} images/s"
        if size > 1:
            text += f" ({rate / size:,.1f} per {'GPU' if self.info.get('gpus', True) else 'rank'})"
        return (
            text
            if efficiency is None or size == 1
            else f"{text}, efficiency {100 * efficiency:.1f} %"
        )

    def notes_before(self) -> dict[str, str]:
        """Returns what is printed above the first row that it holds for: the rule of the
        updates.
        """
        rule = self._rule()
        return {"phase": f"phase: {rule}"} if rule else {}

    def notes_after(self) -> dict[str, str]:
        """Returns what is printed below the row that it follows from: the target and trouble."""
        found = {"target": self.target_text(), "trouble": self.trouble_text()}
        return {name: text for name, text in found.items() if text}

    def _rule(self) -> str | None:
        """Returns the rule of the updates, if the optimizer has several and the phase is known."""
        phase = self.values.get("phase")
        optimizer = self.info.get("optimizer", "hybrid")
        if phase is None or not registry.OPTIMIZERS[optimizer].bounded_warmup:
            return None
        return registry.rule(optimizer, phase)

    def phase_text(self) -> str | None:
        """Returns phase, learning rate and, under AdaBound, both bounds."""
        values = self.values
        if values.get("learning_rate") is None:
            return None
        phase, rule = values.get("phase"), self._rule()
        text = f"{rule}, " if rule else ""
        text += f"learning rate {values['learning_rate']:.4g}"
        if phase == 0 and values.get("lower_bound") is not None:
            upper = values.get("upper_bound")
            text += (
                f", bounds {values['lower_bound']:.4g} to"
                f" {'infinity' if upper is None else f'{upper:.4g}'}"
            )
        return text

    def trouble_text(self) -> str | None:
        """Returns waiting for input (from 10 % on) and skipped steps, if there are any."""
        parts = []
        wait = self.values.get("data_wait_fraction")
        if wait is not None and wait >= 0.1:
            parts.append(f"waiting for data {100 * wait:.0f} % of the time")
        if self.values.get("skipped_steps"):
            parts.append(f"{pluralize(self.values['skipped_steps'], 'step')} skipped")
        return ", ".join(parts) or None


def accuracy_texts(
    record: Mapping[str, Any], part: str, *, top5: bool = True
) -> list[tuple[str, str]]:
    """Returns name and text of the loss, top-1 and (validation only) top-5 of `train` or `val`, as
    far as known.
    """
    found = []
    for key, word in (("loss", "loss"), ("top1", "top-1"), ("top5", "top-5")):
        value = record.get(f"{part}_{key}")
        if value is not None and (key != "top5" or (top5 and part == "val")):
            found.append((word, f"{value:.4f}" if key == "loss" else f"{100 * value:.2f} %"))
    return found


# Names and widths. All columns with their separators fit into a terminal of 80.
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
_SEPARATOR = (  # without it the names of neighboring columns, which hold spaces, would read as one
    "|"
)


class EpochTable:
    """Writes records as rows of one table of at most 80 columns."""

    def __init__(self, status: RunStatus):
        self._status = status
        self._columns = [column for column in _COLUMNS if status.top5 or column[0] != "val top-5"]

    def head(self) -> str:
        """Returns the names of the columns."""
        return self._line({name: name for name, _ in self._columns})

    def row(self, record: Mapping[str, Any]) -> str:
        """Returns a step or an epoch record; a step has a fraction of its epoch and no
        validation.
        """
        status = self._status
        done = (
            format_epochs(record["epoch"])
            if record.get("kind") == "epoch"
            else f"{status.position:.2f}"
        )
        left, rate = status.remaining_seconds(), record.get("images_per_second")
        cells = {"epoch": f"{done}/{format_epochs(status.total_epochs)}"}
        for part in ("train", "val"):
            cells |= {f"{part} {name}": text for name, text in accuracy_texts(record, part)}
        cells["images/s"] = "" if not rate else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
        cells["ETA"] = format_remaining_time(left) if left else ""
        return self._line(cells)

    def _line(self, cells: Mapping[str, str]) -> str:
        return _SEPARATOR.join(
            f"{cells.get(name, ''):>{width}}" for name, width in self._columns
        ).rstrip()


def format_remaining_time(seconds: float) -> str:
    """Returns seconds as 0:45, 12:05, 3:07:00 or 4 d 03 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days >= 2:
        return f"{days} d {hours_of_day:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
