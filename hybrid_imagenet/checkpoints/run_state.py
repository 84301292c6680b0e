"""Keeps the position of a run, which the loop advances and a checkpoint stores beside the variables."""

from __future__ import annotations

import dataclasses
from typing import Any

from hybrid_imagenet.numerics.sampling import Cursor


@dataclasses.dataclass
class RunState:
    """The position of a run, the same on every rank.

    Attributes:
      cursor: the next example to read.
      step: optimizer steps done, skipped ones included.
      images: training images processed over all ranks.
      finished_epochs: epochs whose validation is done too; behind `cursor.epoch` between the last step of an epoch and
        the end of its validation.
      closed_at: fractional epochs done when the newest epoch record was made: at the end of an epoch, or inside of one
        where a validation or the end of the run lies.
      seconds: wall time of earlier sessions and this one up to the last record, in seconds.
      best_top1: the best validation top-1 so far, a fraction.
      best_epoch: the epochs that were done when it was first had, fractional inside of an epoch; 0 before the first
        validation.
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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverts `to_dict`."""
        return cls(**{**values, "cursor": Cursor(values["cursor"]["epoch"], values["cursor"]["offset"])})
