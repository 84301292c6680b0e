"""Distributions of weights and optimizer state, on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np


class Histograms(keras.callbacks.Callback):
    """Writes the distribution of each of some variables after every epoch. For rank 0."""

    def __init__(self, write: Callable[[str, np.ndarray, int], None], variables: Mapping[str, keras.Variable]):
        """`write(tag, values, step)` takes each variable under its tag."""
        super().__init__()
        self._write = write
        self._variables = dict(variables)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Fetches and writes all of them."""
        for tag, variable in self._variables.items():
            self._write(tag, variable.numpy(), (logs or {})["step"])
