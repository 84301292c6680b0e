"""Writes a run's records as TensorBoard events, under the tags in TAGS; layers have
`trust_ratio/<layer>` and `learning_rate/<layer>`.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

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
    """Returns the finite numbers of a record under their tags. Training values of an epoch go under
    `epoch/`.
    """
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


class TensorBoard:
    """Event files of a run, without TensorBoard's package; the first record makes the directory.

    A failure, as on a full disk, is reported once and ends the events, not the run: metrics.jsonl
    has the same values.
    """

    def __init__(self, directory: str, report: Callable[[str], None]):
        """Takes the directory, and what receives a line about a failure."""
        import tensorflow as tf

        self._tf, self._directory, self._report = tf, pathlib.Path(directory), report
        self._writer: Any = None
        self._failed = False

    def resumed(self, step: int) -> None:
        """Has TensorBoard leave out the events from a step on; an earlier session wrote them, and
        then lost some.
        """
        self._attempt(lambda: self._restart(step))

    def _restart(self, step: int) -> None:
        if not self._directory.is_dir():
            return
        event, log, now = self._tf.compat.v1.Event, self._tf.compat.v1.SessionLog, time.time()
        # In the order of their names it is read before the events to come, whose names have their
        # host after the time.
        path = self._directory / f"events.out.tfevents.{int(now):010d}.0.{os.getpid()}.v2"
        with self._tf.io.TFRecordWriter(str(path)) as file:
            file.write(event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            start = log(status=log.START)
            file.write(event(wall_time=now, step=step, session_log=start).SerializeToString())

    def log(self, record: Mapping[str, Any]) -> None:
        """Writes the values of a step or epoch record."""
        self._attempt(lambda: self._write(scalars(record), int(record["step"])))

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        metadata = self._tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        if (
            self._writer is None
        ):  # its file has the time in its name, and so follows that of `resumed`
            self._writer = self._tf.summary.create_file_writer(str(self._directory))
        with self._writer.as_default():
            for tag, value in values.items():
                self._tf.summary.write(
                    tag, self._tf.constant(value, self._tf.float32), step=step, metadata=metadata
                )
        self._writer.flush()

    def _attempt(self, call: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # TensorFlow's or the system's
            self._failed = True
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._report(
                f"TensorBoard receives nothing more of this run, which continues: {reason}"
            )
