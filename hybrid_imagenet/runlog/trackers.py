"""Sends a run's records to TensorBoard, beside the view.

TensorBoard's tags are listed in TAGS; layers appear as `trust_ratio/<layer>` and `learning_rate/<layer>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog.live import View

TAGS: Mapping[str, str] = {
    "train_loss": "train/loss",
    "train_top1": "train/top1",
    "train_top5": "train/top5",
    "val_loss": "validation/loss",
    "val_top1": "validation/top1",
    "val_top5": "validation/top5",
    "images_per_second": "speed/images_per_second",
    "step_seconds": "speed/step_seconds",
    "data_wait_fraction": "speed/data_wait_fraction",
    "communication_seconds": "speed/communication_seconds",
    "learning_rate": "optimizer/learning_rate",
    "lower_bound": "optimizer/lower_bound",
    "upper_bound": "optimizer/upper_bound",
    "relative_step": "optimizer/relative_step",
    "momentum": "optimizer/momentum",
    "phase": "optimizer/phase",
    "grad_norm": "optimizer/grad_norm",
    "loss_scale": "optimizer/loss_scale",
    "skipped_steps": "optimizer/skipped_steps",
}
"""TensorBoard tag of each key of a record. The horizontal axis is the optimizer step."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a record under their tags. Training values of an epoch go under `epoch/`."""
    values = {}
    for key, tag in TAGS.items():
        value = record.get(key)
        if value is not None and np.isfinite(value):
            epoch = record.get("kind") == "epoch" and not key.startswith("val_")
            values[f"epoch/{tag}" if epoch else tag] = float(value)
    for layer, ratio in (record.get("trust_ratios") or {}).items():
        if ratio is not None and np.isfinite(ratio):
            values[f"trust_ratio/{layer}"] = float(ratio)
            if record.get("learning_rate") is not None:
                values[f"learning_rate/{layer}"] = float(ratio * record["learning_rate"])
    return values


class Sink(Protocol):
    """The interface of what gets the values of step and epoch records."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Logs values of one step, by tag."""

    def close(self) -> None:
        """Ends the log."""


class WithSinks:
    """A view, and sinks beside it that a run can do without.

    The first failure of a sink is shown, and it gets nothing more: a disk may be full, and
    metrics.jsonl holds all that it would have got.
    """

    def __init__(self, view: View, makers: Mapping[str, Callable[[], Sink]]):
        """Makes the sinks, by name; a UserError that one raises ends the run."""
        self._view = view
        self._sinks: dict[str, Sink] = {}
        for name, make in makers.items():
            self._attempt(name, self._make, name, make)

    def run_started(self, info: Mapping[str, Any]) -> None:
        self._view.run_started(info)

    def advance(self, step: int, position: float | None = None) -> None:
        self._view.advance(step, position)

    def step(self, record: Mapping[str, Any]) -> None:
        self._view.step(record)
        self._log(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        self._view.epoch(record)
        self._log(record)

    def message(self, text: str, rank: int | None = None) -> None:
        self._view.message(text, rank)

    def run_finished(self, summary: Mapping[str, Any] | None = None) -> None:
        self._view.run_finished(summary)
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)

    def _log(self, record: Mapping[str, Any]) -> None:
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.log, scalars(record), int(record["step"]))

    def _make(self, name: str, make: Callable[[], Sink]) -> None:
        self._sinks[name] = make()

    def _attempt(self, name: str, call: Callable[..., object], *arguments: Any) -> None:
        try:
            call(*arguments)
        except UserError:
            raise
        except Exception as error:  # whatever TensorFlow raises: training continues
            self._sinks.pop(name, None)
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._view.message(f"{name} receives nothing more of this run, which continues: {reason}")


class TensorBoard:
    """Writes event files for TensorBoard, whose package need not be installed; the first record makes the directory."""

    def __init__(self, directory: str):
        import tensorflow as tf

        self._tf = tf
        self._writer = tf.summary.create_file_writer(directory)

    def log(self, values: Mapping[str, float], step: int) -> None:
        metadata = self._tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for tag, value in values.items():
                self._tf.summary.write(tag, self._tf.constant(value, self._tf.float32), step=step, metadata=metadata)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
