"""Stops training that only skips steps, and logs the loss scale."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.errors import NumericsError
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer

# Backpropagation reaches the last layers first, so the last ones are named.
MAX_NAMED_LAYERS = 8


class SkippedStepsGuard(TrainingCallback):
    """Logs loss scale, skipped steps and gradient norm, and stops a run that only skips.

    A step whose mean gradient over all ranks is not finite is skipped on all ranks. They look at
    the same steps, so all stop together.
    """

    def __init__(self, optimizer: DistributedOptimizer, max_skipped_steps: int):
        """Takes the optimizer.

        Args:
          optimizer: Optimizer of the model, which skips steps.
          max_skipped_steps: Skipped steps in a row after which training stops.
        """
        super().__init__()
        self._optimizer = optimizer
        self._max_skipped_steps = max_skipped_steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Completes the logs of a step whose values were fetched.

        Raises:
          NumericsError: If too many steps in a row were skipped.
        """
        if logs is None:
            return
        logs |= self._values()
        skipped_in_a_row = int(self._scalar("skipped_in_a_row"))
        if skipped_in_a_row < self._max_skipped_steps:
            return
        layers = self._optimizer.non_finite_variables()
        more = ""
        if len(layers) > MAX_NAMED_LAYERS:
            more = f" and {len(layers) - MAX_NAMED_LAYERS} more"
        raise NumericsError(
            f"step {logs['step']}: the last {skipped_in_a_row} steps had non-finite gradients (loss"
            f" {logs['train_loss']:.4g}, loss scale {logs['loss_scale']:g}; in"
            f" {', '.join(layers[-MAX_NAMED_LAYERS:]) or 'none of this step'}{more}, last layer"
            " last). The latest checkpoint is valid. Resume with a lower learning rate, a longer"
            " warmup or --precision=float32."
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs |= self._values()

    def _values(self) -> dict[str, float]:
        return {
            "loss_scale": self._scalar("loss_scale"),
            "skipped_steps": int(self._scalar("skipped_steps")),
            "grad_norm": self._scalar("grad_norm"),
        }

    def _scalar(self, name: str) -> float:
        return float(self.run.read(name)[0])
