"""Writes the standard logs of a run directory, DAWNBench's and MLPerf's, from its metrics.jsonl and config.json."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import jsonl

_DAWNBENCH_HEADER = "epoch\thours\ttop1Accuracy\ttop5Accuracy"
MLPERF_RULES = "4.0.0"
Line = tuple[float, str, str, Any, dict[str, Any]]  # seconds, event type, key, value, metadata


def write(run_dir: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes logs/dawnbench.tsv and logs/mlperf.log into a run directory.

    Returns:
      The files.

    Raises:
      UserError: if the directory holds no run, or cannot be written.
    """
    run = pathlib.Path(run_dir)
    records = jsonl.read(run / "metrics.jsonl")
    config = files.read_json(run / "config.json")
    contents = {
        "dawnbench.tsv": dawnbench_tsv(records),
        "mlperf.log": mlperf_log(records, config, config["started"]),
    }
    try:
        (run / "logs").mkdir(exist_ok=True)
        for name, text in contents.items():
            (run / "logs" / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {run / 'logs'}: {error.strerror}") from None
    return [run / "logs" / name for name in contents]


def dawnbench_tsv(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns one line per validation: epoch, hours since the start, top-1 and top-5 in percent."""
    lines = [_DAWNBENCH_HEADER]
    for record in records:
        if record.get("kind") == "epoch" and record.get("val_top1") is not None and record.get("seconds") is not None:
            top5 = record.get("val_top5")
            accuracies = (100 * record["val_top1"], float("nan") if top5 is None else 100 * top5)
            values = (record["epoch"], record["seconds"] / 3600, *accuracies)
            lines.append("{:.10g}\t{:.8f}\t{:.4f}\t{:.4f}".format(*values))
    return "\n".join(lines) + "\n"


def mlperf_log(records: Iterable[Mapping[str, Any]], config: Mapping[str, Any], started: float, **facts: Any) -> str:
    """Returns MLPerf's log of a run: `:::MLLOG` lines for the open division, as the compliance checker wants them.

    The checker of the `mlperf-logging` package knows the ResNet benchmark up to the rules of training 4.0.0. The closed
    division prescribes SGD or LARS with its own schedule, so runs are logged for the open one.

    The run stops, as MLPerf's rules have it, with the evaluation that met the target; what followed is not in the log.
    Events at one time of the records are a millisecond apart, so that every event has a time of its own.

    Args:
      records: the records of metrics.jsonl.
      config: the content of config.json; `flags`, `world_size`, `train_images`, `validation_images`, `launched` and
        `peak_learning_rate` are used.
      started: when training began, in seconds since 1970.
      facts: overrides of `submission_org`, `submission_platform`, `submission_status`.

    Returns:
      Lines in order of time. `run_stop` has status success if the target (75.9 %, or the first --target) was met.
    """
    target = (config.get("flags", {}).get("target_top1") or [0.759])[0]
    epochs = [r for r in records if r.get("kind") == "epoch"]
    reached = next((n for n, r in enumerate(epochs, 1) if (r.get("val_top1") or 0.0) >= target), None)
    waited = max(started - config.get("launched", started), 0.0)
    lines = [*_opening(config, facts, waited), *_epochs(epochs[:reached])]
    lines.append((lines[-1][0], "INTERVAL_END", "run_stop", None, {"status": "success" if reached else "aborted"}))
    return "".join(_format(time, line) for time, line in zip(_times(started, lines), lines, strict=True))


def _times(started: float, lines: Iterable[Line]) -> Iterator[int]:
    """Returns the milliseconds since 1970 of each line, each later than the one before it."""
    last = 0
    for seconds, *_ in lines:
        last = max(round(1000 * (started + seconds)), last + 1)
        yield last


def _opening(config: Mapping[str, Any], facts: Mapping[str, Any], waited: float) -> Iterator[Line]:
    """The description of the run, `waited` seconds before training begins, when its command was started."""
    flags = config.get("flags", {})
    world_size = config.get("world_size", 1)
    device = config.get("gpu") if config.get("gpu") not in (None, "none") else config.get("cpu", "unknown")
    accumulation = flags.get("gradient_accumulation_steps") or 1
    values = {
        "cache_clear": True,
        "submission_benchmark": "resnet",
        "submission_division": "open",
        "submission_org": facts.get("submission_org", "unofficial"),
        "submission_platform": facts.get("submission_platform", f"{world_size} x {device}"),
        "submission_status": facts.get("submission_status", "research"),
        "seed": flags.get("seed", 0),
        "global_batch_size": world_size * flags.get("virtual_gpus", 1) * flags.get("per_gpu_batch", 0) * accumulation,
        "gradient_accumulation_steps": accumulation,
        "train_samples": config.get("train_images"),
        "eval_samples": config.get("validation_images"),
        "opt_name": flags.get("optimizer", "unknown"),
        "opt_base_learning_rate": config.get("peak_learning_rate"),
        "opt_weight_decay": flags.get("weight_decay"),
    }
    yield -waited, "INTERVAL_START", "init_start", None, {}
    for key, value in values.items():
        yield -waited, "POINT_IN_TIME", key, value, {}
    yield 0.0, "INTERVAL_END", "init_stop", None, {}
    yield 0.0, "INTERVAL_START", "run_start", None, {}


def _epochs(epochs: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    before = 0.0
    for record in epochs:
        number = {"epoch_num": record["epoch"]}
        end = float(record.get("seconds") or before)
        trained = max(end - (record.get("validation_seconds") or 0.0), before)
        yield before, "INTERVAL_START", "epoch_start", None, number
        yield trained, "INTERVAL_END", "epoch_stop", None, number
        if record.get("val_top1") is not None:
            yield trained, "INTERVAL_START", "eval_start", None, number
            yield end, "POINT_IN_TIME", "eval_accuracy", record["val_top1"], number
            yield end, "INTERVAL_END", "eval_stop", None, number
        before = end


def _format(milliseconds: int, line: Line) -> str:
    _, event, key, value, metadata = line
    content = {
        "namespace": "",
        "time_ms": milliseconds,
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": {**metadata, "file": "metrics.jsonl", "lineno": 0},
    }
    return f":::MLLOG {json.dumps(content)}\n"
