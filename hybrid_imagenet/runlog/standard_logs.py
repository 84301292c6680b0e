"""Writes the standard logs of a run directory from its metrics.jsonl and config.json."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from typing import Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import dawnbench, jsonl, mlperf


def write(run_dir: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes logs/dawnbench.tsv, logs/dawnbench.json and logs/mlperf.log into a run directory.

    The time at which training began is `started` (seconds since 1970) in config.json; without it, it is reckoned back
    from the last change of metrics.jsonl.

    Returns:
      The files.

    Raises:
      UserError: if the directory holds no run, or cannot be written.
    """
    run = pathlib.Path(run_dir)
    records = jsonl.read(run / "metrics.jsonl")
    config = read_json(run / "config.json")
    started = config.get("started")
    if started is None:
        lasted = max((r.get("seconds") or 0.0 for r in records), default=0.0)
        started = (run / "metrics.jsonl").stat().st_mtime - lasted
    day = datetime.datetime.fromtimestamp(started, datetime.timezone.utc).date().isoformat()
    contents = {
        "dawnbench.tsv": dawnbench.tsv(records),
        "dawnbench.json": json.dumps(dawnbench.entry(config, day), indent=2) + "\n",
        "mlperf.log": mlperf.log(records, config, started),
    }
    try:
        (run / "logs").mkdir(exist_ok=True)
        for name, text in contents.items():
            (run / "logs" / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {run / 'logs'}: {error.strerror}") from None
    return [run / "logs" / name for name in contents]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; raises UserError if it cannot be read or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    return content
