"""Tells the watchdog that training advances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class NoteProgress(keras.callbacks.Callback):
    """Notes every finished step and epoch."""

    def __init__(self, note: Callable[[int | None], None]):
        """`note(step)` is the watchdog's; None for progress other than a step."""
        super().__init__()
        self._note = note

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the step."""
        self._note(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that the validation is done."""
        self._note(None)
