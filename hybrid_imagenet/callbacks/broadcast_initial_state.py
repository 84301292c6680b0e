"""Sends the state of rank 0 to all ranks when `fit` starts."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.broadcast import broadcast_model
from hybrid_imagenet.callbacks.layer_losses import reject_losses_of_several_values
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.order.same_order import check_same_order


class BroadcastInitialState(TrainingCallback):
    """Sends rank 0's weights, optimizer state and first epoch to all ranks when `fit` starts.

    It is one of `default_callbacks()`. A callback of rank 0 earlier in the list may have restored
    them.

    Reference:
      Lu et al. §2.2.3.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the state; every rank calls it.

        Raises:
          UserError: On all ranks, if they have different numbers of steps, or as `broadcast_model`.
        """
        check_same_order(self.communicator)
        steps = self.communicator.allgather_object(self.params.get("steps"))
        if len(set(steps)) > 1:
            raise SharedError(
                "the ranks have different numbers of steps per epoch"
                f" ({', '.join(map(str, steps))}), and some would wait forever: divide the data"
                " with hybrid_imagenet.data.shard, or pass steps_per_epoch"
            )
        broadcast_model(self.model, self.communicator)
        # Only several ranks need all weights before the first step.
        self._broadcast_weight_ids: set[int] | None = None
        if self.communicator.size > 1:
            self._broadcast_weight_ids = {id(weight) for weight in self.model.weights}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks after the first step that it has created no weights, and the losses of layers.

        Raises:
          UserError: On all ranks, with the weights that were not broadcast, or for a loss of
            several values.
        """
        if self._broadcast_weight_ids is None:
            return
        known = self._broadcast_weight_ids
        self._broadcast_weight_ids = None
        new_paths = [weight.path for weight in self.model.weights if id(weight) not in known]
        if new_paths:
            raise SharedError(
                f"The first step created weights ({', '.join(new_paths[:3])}), which therefore"
                " differ between ranks. Give their layers an Input, or call them on one batch"
                " before fit."
            )
        reject_losses_of_several_values(self.model)
