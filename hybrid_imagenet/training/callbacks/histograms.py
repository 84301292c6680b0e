"""Writes the distributions of weights and optimizer state, on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.base import GroupedOptimizer


def distributions(inner: GroupedOptimizer, variables: Sequence[keras.Variable]) -> dict[str, keras.Variable]:
    """Returns the trainable kernels and, for optimizers that keep one, their first moments, by tag."""
    found = {f"weights/{variables[i].path}": variables[i] for i in inner.kernel_indices()}
    moments = getattr(inner, inner.slots[0]) if inner.slots else []
    return found | {f"moment/{variables[i].path}": moments[i] for i in inner.kernel_indices() if moments}


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
