"""Writes synthetic run directories for the tests of the report. No number was measured."""

import json
import math
import pathlib


def make_run(
    directory: pathlib.Path,
    *,
    epochs: int = 12,
    world_size: int = 2,
    finished: bool = True,
    full: bool = True,
    **flags,
) -> pathlib.Path:
    """Writes config.json, metrics.jsonl and summary.json of a synthetic run.

    Args:
      directory: Must not exist.
      epochs: Number of epoch records.
      world_size: Number of ranks.
      finished: Whether to write summary.json.
      full: Also record values that only some runs have: relative updates, input, communication.
      flags: Flags that differ from the defaults below.
    """
    from hybrid_imagenet.config import stored
    from hybrid_imagenet.runlog import summary

    directory.mkdir(parents=True)
    settings = {
        "model": "resnet50",
        "dataset": "synthetic",
        "epochs": 12,
        "per_gpu_batch": 32,
        "lr": 0.1,
        "target_top1": [0.75],
        "recipe": "hybrid",
        "deterministic": False,
        "torus_grid": None,
    } | flags
    config = {
        "format": stored.FORMAT,
        "flags": settings,
        "origins": {},
        "version": "0.0",
        "world_size": world_size,
        "hosts": ["made-up"] * world_size,
        "tensorflow": "0.0",
        "cpu": "made-up CPU",
        "gpu": "none",
        "train_images": 1000,
        "commit": "0" * 40,
    }
    (directory / "config.json").write_text(json.dumps(config))
    rows = []
    seconds = 0.0
    rate = 90.0 * world_size**0.9
    steps = round(1000 / (32 * world_size))
    for epoch in range(1, epochs + 1):
        level = 0.85 * (1 - math.exp(-epoch / 4))
        common = {
            "epoch": epoch,
            "train_loss": 2 * math.exp(-epoch / 5),
            "train_top1": level,
            "images_per_second": rate,
            "data_wait_fraction": 0.04,
            **_schedule(epoch),
        }
        if full:
            common |= {"communication_seconds": 0.02, "slowest_rank_seconds": 0.01}
        for part in (0.5, 1.0):
            seconds += 0.5 * 1000 / rate
            rows.append(
                {
                    "kind": "step",
                    "position": epoch - 1 + part,
                    "seconds": seconds,
                    "step": round((epoch - 1 + part) * steps),
                    "step_seconds": 32 * world_size / rate,
                    **common,
                }
            )
        seconds += 1.0
        rows.append(
            {
                "kind": "epoch",
                "step": epoch * steps,
                "seconds": seconds,
                "global_batch": 32 * world_size,
                "val_loss": 0.2 + 2 * math.exp(-epoch / 5),
                "val_top1": level - 0.02,
                "val_top5": min(level + 0.12, 1.0),
                "train_seconds": 1000 / rate,
                "validation_seconds": 1.0,
                **common,
            }
        )
        if full:
            ratios = {
                f"stage{i // 4}_block{i % 4}/conv": 1e-3 * 1.3**i * (1 + 0.1 * epoch)
                for i in range(16)
            }
            rows[-1] |= {
                "relative_updates": ratios,
                "bytes_read": 1.1e8,
                "reads": 1000,
                "checkpoint_seconds": 0.2,
            }
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        values = summary.summarize(
            rows,
            world_size=world_size,
            images_per_epoch=1000,
            targets=settings["target_top1"],
            single_gpu_images_per_second=90.0,
        )
        (directory / "summary.json").write_text(json.dumps(values))
    return directory


def _schedule(epoch: int) -> dict:
    if epoch <= 4:
        upper = 0.2 + 1000 / epoch - 1000 / 4
        return {
            "phase": 0.0,
            "learning_rate": 0.2,
            "lower_bound": 0.05 * epoch,
            "upper_bound": upper,
        }
    rate = 0.2 * 0.9 ** (epoch - 5)
    bounds = {"lower_bound": 0.2, "upper_bound": 0.2}
    return {"phase": 1.0, "learning_rate": rate, **bounds}
