"""Evaluates the network on the validation images of all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.training.accumulators import ClassificationSums
from hybrid_imagenet.training.step import EvaluationStep

_WORST = 20  # images that image_results names
_AGREE_EVERY = 50  # batches after which all ranks hear of one that cannot read on


class Validation:
    """Evaluates every validation image exactly once, whatever the number of ranks and the batch.

    Attributes:
      found: float32 [images, 3] of the last pass, by image of the source: rows as `EvaluationStep`
      returns them.
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
    ):
        """Takes `batch`, images per rank and step; the rest as `pipeline.evaluation_batches`."""
        self.found = np.zeros((0, 3), np.float32)
        self.start_seconds = 0.0
        self._compiled = False
        self._batch = batch
        self._step = step
        self._source = source
        self._ranks = ranks
        self._batches = pipeline.evaluation_batches(
            source,
            batch,
            ranks.rank,
            ranks.size,
            image_size=image_size,
            crop_fraction=crop_fraction,
            options=options,
        )

    def run(self, on_batch_end: Callable[[int], None] = lambda number: None) -> dict[str, float]:
        """Returns the results over all ranks: `val_loss` (nats), `val_top1`, `val_top5`
        (fractions), `val_count` images, and `val_dropped`, those that are bad.

        `on_batch_end` is called after every batch, with its number from 0.

        Raises:
          UserError: on all ranks, for a bad record under "fail", or more than `max_bad_records` of
            all ranks.
        """
        self._step.sums.reset()
        results = []  # fetched after the pass, so that no batch waits for the one before
        self.start_seconds = 0.0
        batches = iter(self._batches)
        for number in itertools.count(1):
            batch = failure = None
            try:
                batch = next(batches, None)
            except UserError as error:
                failure = error
            if batch is None or number % _AGREE_EVERY == 0:
                self._ranks.raise_first_error(failure)
            if batch is None:
                break
            began = time.perf_counter()
            results.append(self._step(batch))
            if not self._compiled:  # the call returns when the step is compiled
                self.start_seconds, self._compiled = time.perf_counter() - began, True
            on_batch_end(number - 1)
        found = np.zeros((len(results), self._ranks.size, self._batch, 3), np.float32)
        for rows, result in zip(found[:, self._ranks.rank], results, strict=True):
            rows[:] = result.numpy()
        found = found.reshape(-1, 3)[: self._source.num_examples]
        self.found = self._ranks.allreduce_on_host(tf.constant(found), "image_results").numpy()
        vector = self._ranks.allreduce_sum(self._step.sums.variable.read_value(), "validation_sums")
        total = ClassificationSums.from_vector(vector)
        self._batches.bad_records.merge_from_ranks(
            self._ranks.allgather_object(self._batches.bad_records.reason_pairs())
        )
        count = int(total.count)
        return {
            **total.means("val"),
            "val_count": count,
            "val_dropped": self._source.num_examples - count,
        }

    def image_results(self) -> dict[str, Any]:
        """Returns what the last pass found for the n images that it used.

        `label` and `predicted`, int32 [n]; `probability` of the predicted class, float32 [n];
        `class_names`; `worst`, int64 [k], the wrong images of the highest probability, and their
        files, `worst_files`.
        """
        used = np.flatnonzero(self.found[:, 0])
        label, predicted, probability = self.found[used].T
        wrong = np.flatnonzero(label != predicted)
        worst = wrong[np.argsort(-probability[wrong], kind="stable")[:_WORST]]
        files = [self._source.locate(int(index)) for index in used[worst]]
        return {
            "label": label.astype(np.int32) - 1,
            "predicted": predicted.astype(np.int32) - 1,
            "probability": probability,
            "class_names": np.array(self._source.class_names, str),
            "worst": worst,
            "worst_files": np.array(
                [without_secrets(f"{file}, at {at}" if at else file) for file, at in files], str
            ),
        }
