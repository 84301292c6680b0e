"""Tells the watchdog that training advances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from tensorflow.python.eager import execute  # here the main thread is while a step runs
from tensorflow.python.framework import ops  # and here while it fetches a value

from hybrid_imagenet import comm
from hybrid_imagenet.comm import process
from hybrid_imagenet.resilience.heartbeats import Call
from hybrid_imagenet.resilience.watchdog import Watchdog


class NoteProgress(keras.callbacks.Callback):
    """Notes every finished step and epoch."""

    def __init__(self, note: Callable[[int | None], None]):
        """`note(step)` is the watchdog's; None for progress other than a step."""
        super().__init__()
        self._note = note

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._note(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._note(None)


class WatchRanks(keras.callbacks.Callback):
    """Runs a watchdog during `model.fit`: ranks that hang are named, and end the job (`resilience.watchdog`).

    It ends with `fit`, also where an exception ends `fit` on this rank: what the process does then is its own business.
    """

    def __init__(self, stall_seconds: float = 600.0):
        """Ends all ranks with exit code 4 when one makes no progress for `stall_seconds`; before the first step, which
        compiles, when one gives no sign of life for so long.
        """
        super().__init__()
        self._stall_seconds = stall_seconds
        self._watchdog: Watchdog | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts it; every rank calls it."""
        self.on_train_end()
        self._before = self._done = 0
        self._watchdog = Watchdog(
            process.current(),
            self._stall_seconds,
            waits_in=(comm, execute, ops),
            lasts=Call("fit").lasts,
            option="stall_seconds",
            remedy="",
        )
        self._watchdog.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts on: Keras numbers the steps of each epoch from 0."""
        self._before += self._done
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._done = batch + 1
        self._tell(self._before + self._done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._tell(None)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._tell(None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _tell(self, step: int | None) -> None:
        if self._watchdog is not None:
            self._watchdog.note(step)
