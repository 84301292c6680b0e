"""Gives a rank its training batches, with the batch and image sizes that each epoch asks for, from
any cursor.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig, derived
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.bad_records import BadRecords
from hybrid_imagenet.data.listing import surplus_classes_message
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.schedules.run_length import RunLength
from hybrid_imagenet.training.step import Batch

# Batches per GPU behind --batch_norm=precise.
_PRECISE_BATCHES = 16

_log = logging.getLogger(__name__)


class TrainingData:
    """Reads this rank's share of the training examples."""

    def __init__(
        self,
        config: RunConfig,
        source: Source,
        order: SampleOrder,
        communicator: Communicator,
        options: pipeline.HostOptions,
    ):
        """Takes the parts; nothing is read before a stream is asked for."""
        self.source = source
        self.order = order
        self.length = RunLength(order, config.epochs, config.max_steps)
        self._config = config
        self._ranks = communicator
        self.options = options
        self._stages, self._sizes = derived.batches(config), derived.sizes(config)
        self.bad = BadRecords(source, options.bad_records, options.max_bad_records)
        self._stream: pipeline.Batches | None = None
        self._start = Cursor()
        self._list_checked = False

    def sizes(self, epoch: int) -> tuple[int, int]:
        """Returns images per GPU and micro-batch, and micro-batches per update, in an epoch counted
        from 0.
        """
        stage = self._stages.at(epoch)
        return stage.per_gpu_batch, stage.accumulation

    def global_batch(self, epoch: int) -> int:
        """Returns the images of all ranks per update."""
        return self._stages.at(epoch).global_batch(self._config.gpus)

    def facts(self, epoch: int) -> dict[str, int]:
        """Returns the sizes that records tell."""
        images, micro_batches = self.sizes(epoch)
        return {
            "per_gpu_batch": images,
            "accumulation": micro_batches,
            "image_size": self._sizes.at(epoch),
        }

    def stream(self, cursor: Cursor, step: int = 0) -> Iterator[Batch]:
        """Yields the micro-batches from a cursor, which `step` updates lie before, to the end of
        training.
        """
        self._start = cursor
        limit = self.length.max_steps
        self._stream = self._batches(
            cursor, self.length.epochs, None if limit is None else max(limit - step, 0)
        )
        return iter(self._stream)

    def sample(self, epoch: int, note: Callable[[], None]) -> Iterator[Batch]:
        """Yields the batches of an epoch for precise statistics; calls `note` before each."""
        for batch in itertools.islice(self._batches(Cursor(epoch, 0), epoch + 2), _PRECISE_BATCHES):
            note()
            yield batch

    def images(self, epoch: int, cursor: Cursor) -> int:
        """Returns how many examples of an epoch are read over all ranks until a cursor, which may
        end inside of it.
        """
        if cursor.epoch == epoch:
            return cursor.offset
        offset = self._start.offset if epoch == self._start.epoch else 0
        return self.source.num_examples - self.order.num_dropped(self.global_batch(epoch), offset)

    def check_class_list(self, epoch: int, cursor: Cursor, largest: int) -> None:
        """Warns once, on rank 0, if a list of classes names more than a whole epoch has shown."""
        whole = self.images(epoch, cursor) > self.source.num_examples - self.global_batch(epoch)
        if (
            self._start > Cursor(epoch)
            or self.source.unverified_class_list is None
            or self._list_checked
            or not whole
        ):
            return
        self._list_checked = True
        if self._ranks.rank == 0 and largest + 1 < self.source.num_classes:
            _log.warning(
                "data: %s",
                surplus_classes_message(
                    self.source.unverified_class_list, self.source.num_classes, largest
                ),
            )

    def replaced(self, epoch: int) -> list[tuple[int, int]]:
        """Returns (epoch, example) of those that others replaced on this rank, in this epoch and
        later ones.
        """
        return sorted(pair for pair in set(self.bad.replaced_examples) if pair[0] >= epoch)

    def restore_replaced(self, stored: Any) -> None:
        """Takes over the pairs of the epochs under way.

        Raises:
          UserError: if they are of another form.
        """
        try:
            self.bad.replaced_examples |= {(int(epoch), int(example)) for epoch, example in stored}
        except (TypeError, ValueError):
            raise UserError(
                f"the checkpoint's replaced examples are {stored!r}: it is damaged, remove it"
            ) from None

    @property
    def wait_seconds(self) -> float:
        """Seconds for which training has waited for batches."""
        return self._stream.wait_seconds if self._stream else 0.0

    def _batches(
        self, cursor: Cursor, epochs: float, max_steps: int | None = None
    ) -> pipeline.Batches:
        return pipeline.training_batches(
            self.source,
            self.order,
            cursor,
            self.sizes,
            self._ranks.rank,
            self._ranks.size,
            epochs=epochs,
            max_steps=max_steps,
            image_size=self._sizes.at,
            augmentation=self._config.augmentation,
            options=self.options,
            bad_records=self.bad,
            virtual_gpus=self._config.virtual_gpus,
        )


def all_replaced(
    data: TrainingData, epoch: int, gather: Callable[[Any], list[Any]]
) -> list[list[int]]:
    """Returns [epoch, example] of those that others replaced, in this epoch and later ones, each
    once over all ranks.

    They are examples, not counts: an example that is read again after a restart, on whatever rank,
    counts once.
    """
    pairs = {(number, example) for part in gather(data.replaced(epoch)) for number, example in part}
    return [list(pair) for pair in sorted(pairs)]
