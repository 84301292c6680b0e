"""Evaluates the network on the validation images of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.training.accumulators import from_vector
from hybrid_imagenet.training.step import EvaluationStep


class Validation:
    """Evaluates every validation image exactly once, whatever the number of ranks and the batch.

    Attributes:
      right: see `__init__`.
      start_seconds: for which the step was compiled in the last pass; 0 in all but the first.
    """

    def __init__(
        self,
        step: EvaluationStep,
        source: Source,
        ranks: Communicator,
        *,
        batch: int,
        image_size: int,
        crop_fraction: float,
        options: pipeline.HostOptions,
        by_image: bool = False,
    ):
        """Takes `batch`, images per rank and step; for the rest see `data.pipeline.evaluation`.

        With `by_image`, `right` tells after a pass which images of the source were right: bool [n], on every rank.
        """
        self.right: npt.NDArray[np.bool_] | None = None
        self.start_seconds = 0.0
        self._compiled = False
        self._by_image = by_image
        self._batch = batch
        self._step = step
        self._source = source
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
        """Returns the results over all ranks: `val_loss` (nats), `val_top1`, `val_top5` (fractions), `val_count`
        images, and `val_dropped`, those that are bad.

        `note` is called after every batch.

        Raises:
          UserError: on all ranks, if they have found more than `max_bad_records` bad records together.
        """
        self._step.sums.reset()
        found = np.zeros(self._source.num_examples, np.int32)
        self.start_seconds = 0.0
        for number, batch in enumerate(self._batches):
            began = time.perf_counter()
            right = self._step(batch)
            if not self._compiled:  # the call returns when the step is compiled
                self.start_seconds, self._compiled = time.perf_counter() - began, True
            if self._by_image:
                first = (number * self._ranks.size + self._ranks.rank) * self._batch
                places = first + np.flatnonzero(batch["weight"].numpy())
                found[places] = right.numpy()[places - first]
            note()
        if self._by_image:
            self.right = self._ranks.allreduce_on_host(tf.constant(found), "image_results").numpy() > 0
        vector = self._ranks.allreduce_sum(self._step.sums.variable.read_value(), "validation_sums")
        total = from_vector(vector)
        self._batches.bad.share(self._ranks.allgather_object(self._batches.bad.pairs()))
        count = int(total.count)
        return {**total.means("val"), "val_count": count, "val_dropped": self._source.num_examples - count}
