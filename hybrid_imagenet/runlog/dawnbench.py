"""Writes DAWNBench's log of a training run: a TSV of accuracies by epoch, and the JSON that describes the entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HEADER = "epoch\thours\ttop1Accuracy\ttop5Accuracy"


def tsv(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns one line per validation: epoch, hours since the start, top-1 and top-5 in percent."""
    lines = [HEADER]
    for record in records:
        if record.get("kind") == "epoch" and record.get("val_top1") is not None and record.get("seconds") is not None:
            top5 = record.get("val_top5")
            accuracies = (100 * record["val_top1"], float("nan") if top5 is None else 100 * top5)
            values = (record["epoch"], record["seconds"] / 3600, *accuracies)
            lines.append("{:.10g}\t{:.8f}\t{:.4f}\t{:.4f}".format(*values))
    return "\n".join(lines) + "\n"


def entry(config: Mapping[str, Any], timestamp: str) -> dict[str, Any]:
    """Returns the description that goes with the TSV, in the fields that DAWNBench's training entries have.

    Args:
      config: the content of a run's config.json.
      timestamp: the day, YYYY-MM-DD.
    """
    flags = config.get("flags", {})
    device = config.get("gpu") if config.get("gpu") not in (None, "none") else config.get("cpu", "unknown")
    return {
        "version": "v1.0",
        "author": "",
        "authorEmail": "",
        "framework": f"TensorFlow {config.get('tensorflow', 'unknown')}",
        "codeURL": "",
        "model": flags.get("model", "unknown"),
        "hardware": f"{config.get('world_size', 1)} x {device}",
        "costPerHour": None,
        "timestamp": timestamp,
        "logFilename": "dawnbench.tsv",
        "misc": {
            key: flags[key] for key in ("recipe", "dataset", "epochs", "per_gpu_batch", "precision") if key in flags
        },
    }
