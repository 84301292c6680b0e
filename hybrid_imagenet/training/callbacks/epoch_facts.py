"""Adds to each epoch's record the values that are known before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras


class EpochFacts(keras.callbacks.Callback):
    """Adds `per_gpu_batch`, which batch normalization sees, `accumulation` and `image_size` to epoch records."""

    def __init__(self, facts: Callable[[int], Mapping[str, Any]]):
        """Takes `facts(epoch)`, which gives the values for an epoch counted from 0."""
        super().__init__()
        self._facts = facts

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._facts(epoch))
