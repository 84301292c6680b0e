"""Names cells (one training run each) by their flags, and reads their results.

So studies share cells that are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import config as configuration
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.config import Origin
from hybrid_imagenet.config.flags import CHOICES
from hybrid_imagenet.errors import EXIT_NUMERICS, EXIT_OK, EXIT_PREEMPTED, UserError
from hybrid_imagenet.files import read_json, read_or_none
from hybrid_imagenet.runlog import jsonl

FINISHED, FAILED, DIVERGED, MISSING = "finished", "failed", "diverged", "missing"

WATCHING = frozenset(
    {
        *("run_dir", "progress", "log_every_steps", "tensorboard", "stall_timeout"),
        *(
            "checkpoint_every_epochs",
            "checkpoint_every_steps",
            "checkpoint_every_seconds",
            "keep_checkpoints",
            "keep_best",
        ),
        *(
            "single_gpu_throughput",
            "profile_steps",
            "resume",
        ),
    }
)
"""Flags that watch, save or report a training without changing it: equal cells may differ in
them.
"""
_NAMED_AFTER = {"warmup_start_lr": 0.1}
"""Defaults that some optimizers had when cells were first named after their flags; finished cells
keep their names.
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run in its own directory: flags of the training program, and a number of ranks.

    The flags do not include --run_dir.
    """

    directory: pathlib.Path
    flags: tuple[str, ...]
    ranks: int

    @property
    def run_dir(self) -> pathlib.Path:
        """The run directory of the training program."""
        return self.directory / "run"

    @property
    def output(self) -> pathlib.Path:
        """The file with the training program's output."""
        return self.directory / "output.txt"

    @property
    def marker(self) -> pathlib.Path:
        """Flags, ranks and, once it has ended, the exit code."""
        return self.directory / "cell.json"


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a cell.

    Attributes:
      status: `finished`, `failed`, `diverged` (non-finite gradients or loss) or `missing` (not run
        to its end yet).
      reason: Reason of a failure, one line.
      summary: Summary of the run; empty where there is none.
      epochs: Its records by epoch.
      facts: The `config.json` without the flags: versions and numbers of images.
      settings: Every flag of the run with its value.
      right: Which validation images the last validation got right, bool [images]; None where the
        run did not keep it.
    """

    status: str
    reason: str = ""
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)
    epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    right: npt.NDArray[np.bool_] | None = dataclasses.field(default=None, compare=False)


def create(root: pathlib.Path, flags: Sequence[str], ranks: int) -> Cell:
    """Returns the cell of some flags.

    Its directory depends on their resolved values, not on how they were written.

    Raises:
      UserError: For flags that cannot be used.
    """
    settings = resolved(flags)
    text = json.dumps([settings, ranks], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Cell(root / "cells" / name, tuple(flags), ranks)


def chosen_defaults(selected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of the options that come with the values of these flags.

    Those of `CHOICES` are among them.
    """
    return {
        name: known.default
        for flag in CHOICES
        for name, known in CHOICES[flag][selected[flag]].items()
    }


def resolved(flags: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that affect training and differ from the defaults of `hybrid`."""
    config = configuration.resolve(flags)
    plain = configuration.resolve(()).as_dict() | chosen_defaults(config.as_dict())
    follows = {
        name: plain[name] for name, origin in config.origins.items() if origin is Origin.BATCH
    }
    values, defaults = json.loads(
        json.dumps([config.as_dict() | follows, plain | _NAMED_AFTER])
    )  # tuples become lists
    return {
        name: value
        for name, value in values.items()
        if value != defaults[name] and name not in WATCHING
    }


def read(cell: Cell) -> Result:
    """The state of a cell as its directory shows it."""
    try:
        marker = json.loads(cell.marker.read_text(encoding="utf-8"))
        code = marker.get("exit_code")
    except (OSError, ValueError, AttributeError):
        return Result(MISSING)
    if code in (None, EXIT_PREEMPTED):
        return Result(MISSING)
    epochs, facts, settings = _records(cell)
    if code != EXIT_OK:
        status = DIVERGED if code == EXIT_NUMERICS else FAILED
        return Result(
            status,
            f"exit code {code}: {scaling.failure_reason(_said(cell))}",
            {},
            epochs,
            facts,
            settings,
        )
    try:
        summary = read_json(cell.run_dir / "summary.json")
    except UserError as error:
        return Result(MISSING, str(error))
    if not epochs or not _same_flags(cell, settings):
        return Result(MISSING, "its flags or records differ from the cell's")
    loss = summary.get("val_loss")
    if loss is None or not math.isfinite(loss):
        return Result(
            DIVERGED, "the validation loss is not finite", summary, epochs, facts, settings
        )
    return Result(FINISHED, "", summary, epochs, facts, settings, _right(cell))


def _right(cell: Cell) -> npt.NDArray[np.bool_] | None:
    """Reads which images the last validation got right; None where the run did not keep it."""
    found = read_or_none(
        lambda: dict(np.load(cell.run_dir / "image_results.npz", allow_pickle=False))
    )
    return None if not found else found["label"] == found["predicted"]


def _records(cell: Cell) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Records by epoch, facts and settings; empty where a run ended before it wrote them."""
    try:
        config = read_json(cell.run_dir / "config.json")
        records = jsonl.read_records(cell.run_dir / "metrics.jsonl")
    except UserError:
        return [], {}, {}
    facts = {name: value for name, value in config.items() if name not in ("flags", "origins")}
    return [r for r in records if r.get("kind") == "epoch"], facts, config.get("flags", {})


def _same_flags(cell: Cell, settings: dict[str, Any]) -> bool:
    """Returns whether a run had the values that the cell's flags have today.

    Flags that are newer than the run do not count.
    """
    wanted = configuration.resolve(cell.flags, cell.ranks).as_masked_dict()
    return all(settings[name] == wanted[name] for name in set(settings) & set(wanted) - WATCHING)


def _said(cell: Cell) -> str:
    """Returns the output of the ranks, or "" if its file was deleted."""
    return read_or_none(lambda: cell.output.read_text(encoding="utf-8", errors="replace")) or ""
