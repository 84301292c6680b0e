"""Logs the trust ratios of LARS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer


class TrustRatioLog(TrainingCallback):
    """Logs `trust_ratios`: the ratio of each layer in the last step, if LARS runs."""

    def __init__(self, optimizer: GroupedOptimizer, variables: Sequence[keras.Variable]):
        """Takes the optimizer and the `variables` that it was built on."""
        super().__init__()
        self._optimizer = optimizer
        self._names = [variables[i].path for i in optimizer.kernel_indices()]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        lars_runs = self._optimizer.scales_layers and self._optimizer.hyperparameters["phase"] > 0
        if logs is None or not lars_runs:
            return
        ratios = self._optimizer.trust_ratios.numpy().tolist()
        logs["trust_ratios"] = dict(zip(self._names, ratios, strict=True))
