"""What a rank trains on: batches and images of the sizes that each epoch asks for, from any cursor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import Config, derived
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder
from hybrid_imagenet.training.step import Batch


class TrainingData:
    """Reads this rank's share of the training examples.

    Attributes:
      source: the examples.
      order: their order.
      options: how the host reads them.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        order: SampleOrder,
        communicator: Communicator,
        options: pipeline.HostOptions,
    ):
        """Nothing is read before a stream is asked for."""
        self.source = source
        self.order = order
        self._config = config
        self._ranks = communicator
        self.options = options
        self._stages, self._sizes = derived.batches(config), derived.sizes(config)
        self._stream: pipeline.Batches | None = None

    def sizes(self, epoch: int) -> tuple[int, int]:
        """Images per rank and micro-batch, and micro-batches per update, in an epoch counted from 0."""
        stage = self._stages.at(epoch)
        return stage.per_gpu_batch, stage.accumulation

    def global_batch(self, epoch: int) -> int:
        """Images of all ranks per update."""
        return self._stages.at(epoch).global_batch(self._ranks.size)

    def facts(self, epoch: int) -> dict[str, int]:
        """The sizes that records tell."""
        images, micro_batches = self.sizes(epoch)
        return {"per_gpu_batch": images, "accumulation": micro_batches, "image_size": self._sizes.at(epoch)}

    def stream(self, cursor: Cursor) -> Iterator[Batch]:
        """The micro-batches from a cursor to the end of training."""
        self._stream = self._batches(cursor, self._config.epochs)
        return iter(self._stream)

    def sample(self, epoch: int, note: Callable[[], None]) -> Iterator[Batch]:
        """The first --precise_batch_norm_batches of an epoch; `note` is called before each."""
        for batch in itertools.islice(
            self._batches(Cursor(epoch, 0), epoch + 2), self._config.precise_batch_norm_batches
        ):
            note()
            yield batch

    def bad_records(self) -> int:
        """Records that this rank has skipped."""
        return len(self._stream.bad.known) if self._stream else 0

    @property
    def wait_seconds(self) -> float:
        """The time for which training has waited for batches."""
        return self._stream.wait_seconds if self._stream else 0.0

    def _batches(self, cursor: Cursor, epochs: int) -> pipeline.Batches:
        return pipeline.training(
            self.source,
            self.order,
            cursor,
            self.sizes,
            self._ranks.rank,
            self._ranks.size,
            epochs=epochs,
            image_size=self._sizes.at,
            augmentation=self._config.augmentation,
            options=self.options,
        )
