"""Runs a watchdog during `model.fit`."""

from __future__ import annotations

from typing import Any

import keras
from tensorflow.python.eager import execute  # here the main thread is while a step runs
from tensorflow.python.framework import ops  # and here while it fetches a value

from hybrid_imagenet import comm
from hybrid_imagenet.comm import process
from hybrid_imagenet.resilience.heartbeats import Call
from hybrid_imagenet.resilience.watchdog import Watchdog

STALL_SECONDS = 600.0


class StallWatchdog(keras.callbacks.Callback):
    """Runs a watchdog during `model.fit`: ranks that hang are named, and end the job (`resilience.watchdog`).

    It ends with `fit`, also where an exception ends `fit` on this rank: what the process does then is its own business.
    """

    def __init__(self, stall_timeout: float = STALL_SECONDS):
        """Ends all ranks with exit code 4 when one makes no progress for `stall_timeout`; before the first step, which
        compiles, when one gives no sign of life for so long.
        """
        super().__init__()
        self._stall_seconds = stall_timeout
        self._watchdog: Watchdog | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts it; every rank calls it."""
        self.on_train_end()
        self._before = self._done = 0
        self._watchdog = Watchdog(
            process.communicator(),
            self._stall_seconds,
            waits_in=(comm, execute, ops),
            lasts=Call("fit").lasts,
            option="stall_timeout",
            remedy="",
        )
        self._watchdog.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts on: Keras numbers the steps of each epoch from 0."""
        self._before += self._done
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the step."""
        self._done = batch + 1
        self._tell(self._before + self._done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that the validation is done."""
        self._tell(None)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that validation advances."""
        self._tell(None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops it."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _tell(self, step: int | None) -> None:
        if self._watchdog is not None:
            self._watchdog.note(step)
