"""Merges the statistics of batch normalization over ranks before validation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.callbacks.batch_norm_statistics import BatchNormStatistics
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import process
from hybrid_imagenet.comm.agreement import check_agreement
from hybrid_imagenet.models import normalization
from hybrid_imagenet.optimizers import compiled_model

# A model of your own may begin with a normalization of raw features, whose variances need float64.
_FIT_DTYPE = tf.float64


def merge_batch_norm_statistics(model: keras.Model) -> None:
    """Merges the statistics of batch normalization over ranks; every rank calls it.

    In a custom training loop each rank has the moving averages of its own batches. Call this before
    you evaluate or save the model. In `fit`, `default_callbacks()` does the same before validation
    and at the end of each epoch. Layers with `synchronized=True` and frozen layers stay as they
    are, because all ranks have the same statistics.

    Example:
      hi.merge_batch_norm_statistics(model)
      print(hi.evaluate(model, *test))

    Args:
      model: The network, the same on all ranks; layers of models inside it count, too.

    Reference:
      Lu et al. §2.2.3, see `hi.callbacks.MergeBatchNormStatistics`.
    """
    pairs = normalization.trainable_statistics(model)
    BatchNormStatistics(process.communicator(), pairs, dtype=_FIT_DTYPE).synchronize()


class MergeBatchNormStatistics(TrainingCallback):
    """Merges the statistics of batch normalization over ranks before validation and saving.

    It is one of `default_callbacks()`. Each rank normalizes its own batches. Before the network is
    validated or saved, the statistics μ_i and σ_i² that the ranks have are merged into those of all
    their images:

        μ = mean_i(μ_i)
        σ² = mean_i(σ_i² + μ_i²) - μ²

    Which statistics these are depends on the layers: those of the last iteration, without a moving
    average (Lu et al.; Mikami et al. §2.3), moving averages (Keras), or those that `collect` has
    measured over several batches under the current weights ("precise").

    `batch_norm_statistics.BatchNormStatistics` computes them, with one all-reduce for all layers.
    `fit` merges them at the end of each epoch, too, and the partial sums of gradient accumulation
    become their mean over ranks there. What later callbacks save on one rank is then right for all.

    Args:
      collect: Function that measures this rank's statistics before they are merged (default: None,
        the statistics of the layers).
      merge_parts: Function that merges the statistics of the virtual GPUs of this rank
        (default: does nothing).
      at_epoch_end: Whether to merge at the end of each epoch, where other callbacks may save the
        model; False merges only before a validation or a checkpoint (default: True).
      dtype: Type in which statistics are merged (default: tf.float64).

    Reference:
      Lu et al. §2.2.3.
    """

    def __init__(
        self,
        *,
        collect: Callable[[], None] | None = None,
        merge_parts: Callable[[], None] = lambda: None,
        at_epoch_end: bool = True,
        dtype: tf.DType = _FIT_DTYPE,
    ):
        super().__init__()
        self._collect = collect
        self._merge_parts = merge_parts
        self._at_epoch_end = at_epoch_end
        self._dtype = dtype
        self._merged = False
        self._variable_ids: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._merged = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Merges the statistics before validation.

        Raises:
          UserError: On all ranks, if some of them do not validate here.
        """
        self._check_next("validation")
        self.merge()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Merges the statistics unless a validation has, and the sums of accumulated gradients.

        Raises:
          UserError: On all ranks, as `on_test_begin`.
        """
        if not self._at_epoch_end:
            return
        self._check_next("the end of the epoch")
        if not self._merged:
            self.merge()
        for optimizer in compiled_model.distributed(self.model).values():
            optimizer.average_sums(self.communicator)

    def before_save(self) -> None:
        """Merges the statistics, if the end of the epoch has not done that."""
        if not self._at_epoch_end:
            self.merge()

    def merge(self) -> None:
        """Merges the statistics; every rank calls it."""
        pairs = normalization.trainable_statistics(self.model)
        variable_ids = [id(variable) for pair in pairs for variable in pair]
        if variable_ids != self._variable_ids:
            self._variable_ids = variable_ids
            self._statistics = BatchNormStatistics(
                self.communicator,
                pairs,
                self._collect,
                self._merge_parts,
                dtype=self._dtype,
            )
        if variable_ids:
            self._statistics.synchronize()
        self._merged = True

    def _check_next(self, next_event: str) -> None:
        remedy = "give validation_data and validation_freq to every rank"
        check_agreement(
            self.communicator, {"what comes next": next_event}, "after the steps", remedy
        )
