"""Merges over ranks, in `model.fit`, what each rank keeps by itself between two updates."""

from __future__ import annotations

from typing import Any

import keras

from hybrid_imagenet.comm import process
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.library.optimizer import DistributedOptimizer
from hybrid_imagenet.models import normalization
from hybrid_imagenet.training.batch_norm import BatchNormStatistics


class MergeBatchNormStatistics(keras.callbacks.Callback):
    """Merges statistics of batch normalization before validation and at the end of epochs (`training.batch_norm`).

    Sums of an accumulation that the end of an epoch interrupts become their mean over ranks. So what callbacks later
    in the list save on one rank is right for all.
    """

    def __init__(self) -> None:
        """It finds the layers by itself: a model without `call` may make them in its first step."""
        super().__init__()
        self._merged = False
        self._known: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that training continues."""
        self._merged = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Merges the statistics before validation; every rank calls it."""
        ranks, found = process.communicator(), normalization.kept_statistics(self.model)
        known = [id(variable) for pair in found for variable in pair]
        if known != self._known:
            self._known, self._statistics = known, BatchNormStatistics(ranks.allreduce_sum, ranks.size, found)
        if known:
            self._statistics.synchronize()
        self._merged = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Merges them if no validation has, and the sums; every rank calls it."""
        if not self._merged:
            self.on_test_begin()
        for optimizer in compiled_model.optimizers(self.model).values():
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.average_sums(process.communicator())
