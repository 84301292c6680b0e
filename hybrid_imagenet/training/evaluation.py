"""Evaluates the network on the validation images of all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.training.accumulators import ClassificationSums
from hybrid_imagenet.training.step import EvaluationStep

# Number of misclassified images that `image_results` lists with their files.
MAX_WORST_IMAGES = 20
# If a rank cannot read its images, the others learn it after at most this many batches, which they
# evaluate in vain. Each exchange of errors makes the ranks wait for one another, so more frequent
# ones would slow down every validation.
BATCHES_PER_ERROR_CHECK = 50


class Validation:
    """Evaluates every validation image exactly once, on any number of ranks, in any batch size.

    Attributes:
      image_rows: float32 [images, 3], the results of the last pass by image of the source, as
        `EvaluationStep` returns them.
      compile_seconds: Seconds of the last pass in which the step was compiled; 0 in all passes but
        the first.
    """

    def __init__(
        self,
        step: EvaluationStep,
        source: Source,
        communicator: Communicator,
        *,
        batch: int,
        image_size: int,
        crop_fraction: float,
        options: pipeline.HostOptions,
    ):
        """Prepares to evaluate.

        Args:
          step: Evaluates a batch.
          source: The validation images.
          communicator: Sums the results over ranks.
          batch: Images per rank and step.
          image_size: Side of the images in pixels.
          crop_fraction: Side of the square that is evaluated, as a fraction of the shorter side.
          options: How the host reads and decodes.
        """
        self.image_rows = np.zeros((0, 3), np.float32)
        self.compile_seconds = 0.0
        self._is_compiled = False
        self._batch = batch
        self._step = step
        self._source = source
        self._communicator = communicator
        self._batches = pipeline.evaluation_batches(
            source,
            batch,
            communicator.rank,
            communicator.size,
            image_size=image_size,
            crop_fraction=crop_fraction,
            options=options,
        )

    def run(self, on_batch_end: Callable[[int], None] = lambda number: None) -> dict[str, float]:
        """Evaluates all images; every rank calls it.

        Args:
          on_batch_end: Called after every batch with its number, from 0.

        Returns:
          The results over all ranks: `val_loss` (nats), `val_top1` and `val_top5` (fractions),
          `val_count`, the number of images, and `val_dropped`, the number of bad ones.

        Raises:
          UserError: On all ranks, for a bad record with `bad_records="fail"`, or for more than
            `max_bad_records` of them over all ranks.
        """
        self._step.sums.reset()
        self.image_rows = self._merge_rows(self._evaluate_batches(on_batch_end))
        vector = self._communicator.allreduce_sum(
            self._step.sums.variable.read_value(), "validation_sums"
        )
        sums = ClassificationSums.from_vector(vector)
        bad_records = self._batches.bad_records
        bad_records.merge_from_ranks(
            self._communicator.allgather_object(bad_records.reason_pairs())
        )
        count = int(sums.count)
        return {
            **sums.means("val"),
            "val_count": count,
            "val_dropped": self._source.num_examples - count,
        }

    def _evaluate_batches(self, on_batch_end: Callable[[int], None]) -> list[tf.Tensor]:
        """Evaluates the batches of this rank, and returns the rows of each (`EvaluationStep`).

        The rows stay on the device. Fetching them here would make each batch wait for the one
        before.
        """
        device_rows = []
        self.compile_seconds = 0.0
        batches = iter(self._batches)
        for number in itertools.count():
            failure = None
            try:
                batch = next(batches, None)
            except UserError as error:
                batch = None
                failure = error
            if batch is None or (number + 1) % BATCHES_PER_ERROR_CHECK == 0:
                self._communicator.raise_first_error(failure)
            if batch is None:
                break
            began = time.perf_counter()
            device_rows.append(self._step(batch))
            if not self._is_compiled:
                # The first call returns after the step has been compiled.
                self.compile_seconds = time.perf_counter() - began
                self._is_compiled = True
            on_batch_end(number)
        return device_rows

    def _merge_rows(self, device_rows: Sequence[tf.Tensor]) -> npt.NDArray[np.float32]:
        """Returns the rows of all ranks by image of the source, float32 [images, 3]."""
        communicator = self._communicator
        # A step takes one batch for each rank from the source, so this is the order of the source.
        rows = np.zeros((len(device_rows), communicator.size, self._batch, 3), np.float32)
        for step, batch_rows in enumerate(device_rows):
            rows[step, communicator.rank] = batch_rows.numpy()
        # The last step ends with padding.
        rows = rows.reshape(-1, 3)[: self._source.num_examples]
        merged: npt.NDArray[np.float32] = communicator.allreduce_on_host(
            tf.constant(rows), "image_results"
        ).numpy()
        return merged

    def image_results(self) -> dict[str, Any]:
        """Returns the results of the last pass for each of the n images that were used.

        Returns:
          `label` and `predicted`, int32 [n]; `probability` of the predicted class, float32 [n];
          `class_names`; `worst`, int64 [k], the misclassified images with the highest
          probabilities; and `worst_files`, the files of these.
        """
        # `EvaluationStep` stores labels and predictions plus 1. Rows of padding and of bad images
        # are 0.
        used = np.flatnonzero(self.image_rows[:, 0])
        label, predicted, probability = self.image_rows[used].T
        wrong = np.flatnonzero(label != predicted)
        worst = wrong[np.argsort(-probability[wrong], kind="stable")[:MAX_WORST_IMAGES]]
        worst_files = []
        for index in used[worst]:
            file, offset = self._source.locate(int(index))
            worst_files.append(without_secrets(f"{file}, at {offset}" if offset else file))
        return {
            "label": label.astype(np.int32) - 1,
            "predicted": predicted.astype(np.int32) - 1,
            "probability": probability,
            "class_names": np.array(self._source.class_names, str),
            "worst": worst,
            "worst_files": np.array(worst_files, str),
        }
