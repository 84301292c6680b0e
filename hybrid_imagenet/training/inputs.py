"""Reads a rank's training batches, from any position, in the sizes that each epoch asks for."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.bad_records import BadRecords
from hybrid_imagenet.data.listing import surplus_classes_message
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.training.step import Batch

# Batches of each GPU from which --batch_norm=precise computes the statistics.
_PRECISE_STATISTICS_BATCHES = 16

_log = logging.getLogger(__name__)


class TrainingData:
    """Reads this rank's share of the training examples.

    Attributes:
      source: The training images.
      order: The order in which they are read.
      length: Position at which training ends.
      options: How the host reads and decodes.
      bad_records: Records that cannot be read or decoded, and examples that were replaced.
    """

    def __init__(
        self,
        plan: RunPlan,
        source: Source,
        order: SampleOrder,
        communicator: Communicator,
        options: pipeline.HostOptions,
    ):
        """Prepares to read; nothing is read before `stream` or `statistics_batches` is called.

        Args:
          plan: Plan of the run.
          source: The training images.
          order: The order in which they are read.
          communicator: Has the rank of this process, and the number of ranks.
          options: How the host reads and decodes.
        """
        self.source = source
        self.order = order
        self.length = plan.length(order)
        self.options = options
        self.bad_records = BadRecords(source, options.bad_records, options.max_bad_records)
        self._plan = plan
        self._communicator = communicator
        self._stream: pipeline.Batches | None = None
        self._start = Cursor()
        self._is_class_list_checked = False

    def micro_batches(self, epoch: int) -> tuple[int, int]:
        """Returns the size of micro-batches and their number in an update.

        Args:
          epoch: Counted from 0.

        Returns:
          Images per GPU and micro-batch, and micro-batches per update.
        """
        stage = self._plan.batches.at(epoch)
        return stage.per_gpu_batch, stage.accumulation

    def global_batch(self, epoch: int) -> int:
        """Returns the images per update, over all ranks, in an epoch counted from 0."""
        return self._plan.global_batch(epoch)

    def recorded_sizes(self, epoch: int) -> dict[str, int]:
        """Returns batch and image sizes for the record of an epoch, which is counted from 0."""
        per_gpu_batch, accumulation = self.micro_batches(epoch)
        return {
            "per_gpu_batch": per_gpu_batch,
            "accumulation": accumulation,
            "image_size": self._plan.image_sizes.at(epoch),
        }

    def stream(self, cursor: Cursor, step: int = 0) -> Iterator[Batch]:
        """Returns an iterator over the micro-batches from a cursor to the end of training.

        Args:
          cursor: Position of the first example.
          step: Number of updates that were made before this position.
        """
        self._start = cursor
        max_steps = self.length.max_steps
        if max_steps is not None:
            max_steps = max(max_steps - step, 0)
        self._stream = self._batches(cursor, self.length.epochs, max_steps)
        return iter(self._stream)

    def statistics_batches(
        self, epoch: int, record_progress: Callable[[], None]
    ) -> Iterator[Batch]:
        """Yields the batches from which precise statistics are computed.

        Args:
          epoch: Epoch whose first batches are used.
          record_progress: Called before each batch.
        """
        batches = self._batches(Cursor(epoch, 0), epoch + 2)
        for batch in itertools.islice(batches, _PRECISE_STATISTICS_BATCHES):
            record_progress()
            yield batch

    def num_examples_read(self, epoch: int, cursor: Cursor) -> int:
        """Returns how many examples of an epoch all ranks have read when they reach a cursor.

        Args:
          epoch: Counted from 0.
          cursor: Cursor in this epoch, or after it.
        """
        return cursor.offset if cursor.epoch == epoch else self.source.num_examples

    def check_class_list(self, epoch: int, cursor: Cursor, largest_label: int) -> None:
        """Warns once, on rank 0, if the list of classes has more of them than an epoch has shown.

        Only an epoch that was read from its beginning to its end can show that.

        Args:
          epoch: Counted from 0.
          cursor: Position after what was read.
          largest_label: On any rank.
        """
        class_list = self.source.unverified_class_list
        if class_list is None or self._is_class_list_checked:
            return
        num_read = self.num_examples_read(epoch, cursor)
        is_whole = num_read > self.source.num_examples - self.global_batch(epoch)
        if self._start > Cursor(epoch) or not is_whole:
            return
        self._is_class_list_checked = True
        num_classes = self.source.num_classes
        if self._communicator.rank == 0 and largest_label + 1 < num_classes:
            message = surplus_classes_message(class_list, num_classes, largest_label)
            _log.warning("data: %s", message)

    def replaced_examples(self, epoch: int) -> list[tuple[int, int]]:
        """Returns (epoch, example) of examples that this rank has replaced, because they were bad.

        Args:
          epoch: The first epoch that is listed.
        """
        return sorted(pair for pair in set(self.bad_records.replaced_examples) if pair[0] >= epoch)

    def restore_replaced_examples(self, stored: Any) -> None:
        """Adds the replaced examples that a checkpoint contains.

        Args:
          stored: Pairs (epoch, example), as JSON.

        Raises:
          UserError: If they have another form.
        """
        try:
            pairs = {(int(epoch), int(example)) for epoch, example in stored}
        except (TypeError, ValueError):
            raise UserError(
                f"the checkpoint's replaced examples are {stored!r}, so it is damaged. Remove it."
            ) from None
        self.bad_records.replaced_examples |= pairs

    @property
    def wait_seconds(self) -> float:
        """The seconds for which training has waited for batches."""
        return self._stream.wait_seconds if self._stream else 0.0

    def _batches(
        self, cursor: Cursor, epochs: float, max_steps: int | None = None
    ) -> pipeline.Batches:
        return pipeline.training_batches(
            self.source,
            self.order,
            cursor,
            self.micro_batches,
            self._communicator.rank,
            self._communicator.size,
            epochs=epochs,
            max_steps=max_steps,
            image_size=self._plan.image_sizes.at,
            augmentation=self._plan.data.augmentation,
            options=self.options,
            bad_records=self.bad_records,
            virtual_gpus=self._plan.virtual_gpus,
        )


def replaced_on_all_ranks(
    data: TrainingData, epoch: int, gather: Callable[[Any], list[Any]]
) -> list[list[int]]:
    """Returns [epoch, example] of examples that any rank has replaced; every rank calls it.

    It lists examples instead of counting them, so that an example counts once even if it is read
    again after a restart, on any rank.

    Args:
      data: Data of this rank.
      epoch: The first epoch that is listed.
      gather: Returns the values of all ranks.
    """
    pairs: set[tuple[int, int]] = set()
    for rank_pairs in gather(data.replaced_examples(epoch)):
        pairs.update((number, example) for number, example in rank_pairs)
    return [list(pair) for pair in sorted(pairs)]
