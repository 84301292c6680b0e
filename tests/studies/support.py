"""Writes the files of a training run, without training."""

import json
import pathlib

from hybrid_imagenet import config
from studies import trial_runs


def curve(end, epochs=4):
    """Returns the accuracy by epoch, which rises in a straight line from 0 to `end`."""
    return [end * (epoch + 1) / epochs for epoch in range(epochs)]


def finish(cell, accuracies, loss=0.5):
    """Writes the files of a run that finished with these accuracies by epoch."""
    cell.run_dir.mkdir(parents=True, exist_ok=True)
    resolved = config.resolve([*cell.flags, f"--run_dir={cell.run_dir}"], cell.ranks)
    flags = resolved.as_masked_dict()
    facts = {
        "world_size": cell.ranks,
        "train_images": 1500,
        "validation_images": 297,
        "num_classes": 10,
    }
    facts |= {
        "tensorflow": "2.21.0",
        "keras": "3.15.0",
        "python": "3.11.7",
        "version": "0.1.0",
        "commit": "abc",
    }
    records = [
        {"kind": "epoch", "epoch": epoch, "val_top1": value, "train_top1": value / 2}
        for epoch, value in enumerate(accuracies, 1)
    ]
    summary = {"val_top1": accuracies[-1], "best_val_top1": max(accuracies), "val_loss": loss}
    summary |= {"train_top1": accuracies[-1] / 2, "skipped_steps": 0}
    _write(cell.run_dir / "config.json", json.dumps({"flags": flags, **facts}))
    _write(cell.run_dir / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    _write(cell.run_dir / "summary.json", json.dumps(summary))


def ended(cell, code=0):
    """Writes the marker of a cell whose run ended with this exit code."""
    cell.directory.mkdir(parents=True, exist_ok=True)
    cell.marker.write_text(
        json.dumps({"flags": list(cell.flags), "ranks": cell.ranks, "exit_code": code})
    )


def results(accuracies_by_seed):
    """Returns results by seed; the argument has a list of accuracies by epoch, or a status."""
    results_by_seed = {}
    for seed, accuracies in accuracies_by_seed.items():
        if isinstance(accuracies, str):
            results_by_seed[seed] = trial_runs.Result(accuracies, "exit code 3: error: diverged")
            continue
        records = [
            {"epoch": e, "val_top1": v, "train_top1": v / 2} for e, v in enumerate(accuracies, 1)
        ]
        summary = {"val_top1": accuracies[-1], "best_val_top1": max(accuracies), "val_loss": 0.5}
        results_by_seed[seed] = trial_runs.Result(
            trial_runs.FINISHED, "", summary, records, {"train_images": 1500, "world_size": 2}
        )
    return results_by_seed


def _write(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
