"""One pass over the validation images of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.training.accumulators import from_vector
from hybrid_imagenet.training.step import EvaluationStep


class Ranks(Protocol):
    """What validation needs of a communicator."""

    rank: int
    size: int

    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sum over ranks."""


class Validation:
    """Evaluates every validation image exactly once, whatever the number of ranks and the batch."""

    def __init__(
        self,
        step: EvaluationStep,
        source: Source,
        ranks: Ranks,
        *,
        batch: int,
        image_size: int,
        crop_fraction: float,
        options: pipeline.HostOptions,
    ):
        """`batch` images per rank and step; for the rest see `data.pipeline.evaluation`."""
        self._step = step
        self._ranks = ranks
        self._batches = pipeline.evaluation(
            source,
            batch,
            ranks.rank,
            ranks.size,
            image_size=image_size,
            crop_fraction=crop_fraction,
            options=options,
        )

    def run(self, note: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Returns `val_loss` (nats), `val_top1`, `val_top5` (fractions) and `val_count` over all ranks.

        `note` is called after every batch.
        """
        self._step.sums.reset()
        for batch in self._batches:
            self._step(batch)
            note()
        vector = self._ranks.allreduce_sum(self._step.sums.variable.read_value(), "validation_sums")
        total = from_vector(vector)
        return {**total.means("val"), "val_count": int(total.count)}
