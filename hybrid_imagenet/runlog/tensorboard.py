"""Writes a run's records as TensorBoard events.

The tags are in TAGS. Layers have `trust_ratio/<layer>` and `learning_rate/<layer>`.
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
    "momentum": "optimizer/momentum",
    "phase": "optimizer/phase",
    "grad_norm": "optimizer/grad_norm",
    "loss_scale": "optimizer/loss_scale",
    "skipped_steps": "optimizer/skipped_steps",
}
"""The TensorBoard tag of each key of a record. The horizontal axis is the optimizer step."""

_MAX_REASON_CHARACTERS = 300


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a record by tag.

    Training values of an epoch are under `epoch/`.
    """
    values = {}
    is_epoch = record.get("kind") == "epoch"
    for key, tag in TAGS.items():
        value = record.get(key)
        if value is not None and np.isfinite(value):
            prefix = "epoch/" if is_epoch and not key.startswith("val_") else ""
            values[prefix + tag] = float(value)
    for layer, trust_ratio in (record.get("trust_ratios") or {}).items():
        if trust_ratio is not None and np.isfinite(trust_ratio):
            values[f"trust_ratio/{layer}"] = float(trust_ratio)
            if record.get("learning_rate") is not None:
                values[f"learning_rate/{layer}"] = float(trust_ratio * record["learning_rate"])
    return values


class TensorBoard:
    """Writes event files of a run, without the package of TensorBoard.

    The first record creates the directory. After a failure, such as a full disk, a message is
    printed and no more events are written. The run continues, because metrics.jsonl has the same
    values.
    """

    def __init__(self, directory: str, print_message: Callable[[str], None]):
        """Stores where to write; nothing is written yet.

        Args:
          directory: Directory for the event files.
          print_message: Prints a message about a failure.
        """
        import tensorflow as tf

        self._tf = tf
        self._directory = pathlib.Path(directory)
        self._print_message = print_message
        self._writer: Any = None
        self._failed = False

    def hide_events_from(self, step: int) -> None:
        """Makes TensorBoard ignore earlier events from a step on.

        The session before a resumed one wrote them, but its steps are repeated.
        """
        self._attempt(lambda: self._write_session_start(step))

    def _write_session_start(self, step: int) -> None:
        if not self._directory.is_dir():
            return
        v1 = self._tf.compat.v1
        seconds = time.time()
        # TensorBoard reads files in the order of their names. This name has a number after the time
        # instead of the host, so that it is read before the events of this session.
        path = self._directory / f"events.out.tfevents.{int(seconds):010d}.0.{os.getpid()}.v2"
        version = v1.Event(wall_time=seconds, file_version="brain.Event:2")
        session_log = v1.SessionLog(status=v1.SessionLog.START)
        session_start = v1.Event(wall_time=seconds, step=step, session_log=session_log)
        with self._tf.io.TFRecordWriter(str(path)) as file:
            file.write(version.SerializeToString())
            file.write(session_start.SerializeToString())

    def log(self, record: Mapping[str, Any]) -> None:
        """Writes the values of a step or epoch record."""
        self._attempt(lambda: self._write(scalars(record), int(record["step"])))

    def close(self) -> None:
        if self._writer is not None:
            self._attempt(self._writer.close)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        metadata = self._tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        if self._writer is None:
            # Create the file now, because the time in its name must not be earlier than the time in
            # the name of the file from `hide_events_from`.
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
        except Exception as error:
            # It may be an error of TensorFlow or of the operating system.
            self._failed = True
            message = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
            reason = message or type(error).__name__
            self._print_message(
                f"TensorBoard events can no longer be written: {reason}. The run continues, and"
                " metrics.jsonl has the same values."
            )
