"""Profiles some training steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hybrid_imagenet.callbacks.training_callback import TrainingCallback, print_to_stderr


class Profiler(TrainingCallback):
    """Writes a trace of some steps, which TensorBoard shows.

    Pass it on one rank only. A run that is resumed after the first of the steps writes no trace.

    Example:
      callbacks = hi.callbacks.default_callbacks(hi.callbacks.Profiler(10, 12, "profile"))

    Args:
      first: First step of the trace, counted from 1 over all sessions.
      last: Last step of the trace.
      directory: Directory of the trace.
      wait: Function that returns when the device has finished its work (default: returns at once).
      log: Function that prints a line about how to show the trace (default: prints it to stderr).
    """

    def __init__(
        self,
        first: int,
        last: int,
        directory: str | os.PathLike[str],
        *,
        wait: Callable[[], object] = lambda: None,
        log: Callable[[str], None] = print_to_stderr,
    ):
        super().__init__()
        self._first = first
        self._last = last
        self._directory = os.fspath(directory)
        self._wait = wait
        self._log = log
        self._is_running = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.run.state.step == self._first - 1:
            self._wait()
            tf.profiler.experimental.start(self._directory)
            self._is_running = True
        elif self.run.state.step == self._last:
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the trace of a run that ends before the last step too."""
        self._stop()

    def _stop(self) -> None:
        if not self._is_running:
            return
        self._is_running = False
        self._wait()
        tf.profiler.experimental.stop()
        self._log(
            f"profile of steps {self._first} to {self._last}: tensorboard"
            f" --logdir={self._directory}"
        )
