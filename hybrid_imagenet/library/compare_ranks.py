"""Compares weights, learning rates and the end of training over ranks after each epoch of `model.fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hybrid_imagenet.comm import process
from hybrid_imagenet.library import agreement, compiled_model

_REMEDY = (
    "give callbacks that change weights, learning rate or stop_training to every rank, behind "
    "hybrid_imagenet.callbacks.default_callbacks(...), whose arguments and on_rank_zero are for those that write files"
)


class CompareRanks(keras.callbacks.Callback):
    """Ends training on all ranks when a callback or a step has changed some of them only.

    It compares where an epoch begins and where training ends, after all callbacks of the epoch before. A rank that
    stops meets the others, which begin the next epoch, in this comparison and not in a step, where they would wait.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares; every rank calls it.

        Raises:
          UserError: on all ranks, with the ranks that differ and what differs.
        """
        self._compare(f"epoch {epoch + 1} begins")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Compares after the last epoch; every rank calls it."""
        self._compare("training ends")

    def _compare(self, next_: str) -> None:
        ranks = process.communicator()
        if ranks.size == 1:
            return
        own = {
            "what comes next": next_,
            "weights": agreement.digest(self.model.trainable_variables),
            **{
                f"{name}.learning_rate": np.float32(optimizer.learning_rate)  # as precise as the step sees it
                for name, optimizer in compiled_model.optimizers(self.model).items()
                if hasattr(optimizer, "learning_rate")  # MultiOptimizer has none
            },
        }
        agreement.check(ranks, own, "after an epoch", _REMEDY)
