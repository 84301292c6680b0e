"""Reads finished runs back from the CSV files of studies, so that their directories are not needed.

A row has the flags of its run. Two runs with equal flags are the same run, in whichever study, so a
study finds its runs in the files of others too.
"""

from __future__ import annotations

import csv
import json
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.errors import UserError
from studies import trial_runs
from studies.trial_runs import Cell, Result

_SUMMARY = ("val_top1", "best_val_top1", "val_loss", "train_top1", "skipped_steps")
_BY_EPOCH = ("val_top1", "train_top1")


class Records:
    """The finished and diverged runs of the CSV files in a directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Reads all files; rows with flags that no longer exist are skipped.

        Raises:
          UserError: If there is no CSV file.
        """
        paths = sorted(directory.glob("*.csv"))
        if not paths:
            raise UserError(f"--records={directory} has no CSV file. Set the directory of some.")
        self._results: dict[str, Result] = {}
        for path in paths:
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self._add(row)

    def _add(self, row: Mapping[str, str]) -> None:
        if row.get("status") not in (trial_runs.FINISHED, trial_runs.DIVERGED):
            return
        try:
            key = _key(shlex.split(row["flags"]))
        except (KeyError, UserError):
            return
        self._results.setdefault(key, _result(row))

    def find(self, cell: Cell) -> Result | None:
        """Returns the result of a run of one rank, None if no file has it."""
        return self._results.get(_key(cell.flags)) if cell.ranks == 1 else None


def _key(flags: list[str] | tuple[str, ...]) -> str:
    """Returns what equal runs have in common: all settings but the directory of the data."""
    settings = trial_runs.resolved(flags)
    settings.pop("data_dir", None)
    return json.dumps(settings, sort_keys=True)


def _result(row: Mapping[str, str]) -> Result:
    summary: dict[str, Any] = {name: float(row[name]) for name in _SUMMARY if row.get(name)}
    epochs: dict[int, dict[str, Any]] = {}
    for name in _BY_EPOCH:
        for epoch, number in enumerate((row.get(f"{name}_by_epoch") or "").split(), 1):
            record = epochs.setdefault(epoch, {"epoch": epoch})
            if number != "-":
                record[name] = float(number)
    return Result(row["status"], row["reason"], summary, list(epochs.values()))
