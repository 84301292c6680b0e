"""Gives the data of `fit` an order that a seed and the epoch decide, so that an epoch can continue.

`fit(shuffle=True)` draws a new order of arrays and of the batches of a PyDataset in each epoch. A
later process cannot draw the same order again.
"""

from __future__ import annotations

import abc
import random
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.order.for_keras import ExactDataset

# Seeds of TensorFlow's stateless operations are two int32.
_SEED_LIMIT = 2**31


def choose_seed() -> int:
    """Returns the seed of `keras.utils.set_random_seed`, or a random one without it."""
    seed = private_api.global_seed()
    if seed is None:
        seed = random.SystemRandom().randrange(_SEED_LIMIT)
    return seed % _SEED_LIMIT


class EpochData(abc.ABC):
    """The training data of the running `fit`.

    Attributes:
      is_exact: Whether an epoch can continue after its first batches, with exactly those that have
        not been trained.
      continues_over_epochs: Whether an epoch begins where the previous one ended, as with
        `steps_per_epoch`, so that its first batches cannot be skipped.
      batches: Examples in a batch and batches in an epoch; None where they are not known.
    """

    is_exact = True
    continues_over_epochs = False

    def __init__(self, data: private_api.RunningFitData):
        """Keeps the batches that Keras has made."""
        self._data = data
        batch_size = getattr(data.adapter, "batch_size", None)
        if batch_size is None:
            batch_size = getattr(data.py_dataset, "batch_size", None)
        self.batches: list[int | None] = [batch_size, data.num_batches]

    @abc.abstractmethod
    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        """Sets the batches of the next epoch; call it in each `on_epoch_begin`.

        Args:
          epoch: Number of the epoch, from 0.
          first_batch: Number of the batch that it begins with.
        """


def open_epoch_data(seed: int, rank: int, *, has_order: bool) -> EpochData:
    """Returns the data of the running `fit`; a method of a callback must call it.

    Args:
      seed: Decides the order, together with rank and epoch.
      rank: Ranks have different orders, because each has its own data.
      has_order: Whether a checkpoint restores the sampler of `hi.order.keras_dataset`.
    """
    data = private_api.RunningFitData()
    if data.continues_over_epochs or not data.num_batches:
        return OtherData(data)
    if data.are_arrays:
        return ShuffledArrays(data, seed, rank) if data.are_shuffled else UnshuffledArrays(data)
    dataset = data.py_dataset
    if isinstance(dataset, ExactDataset):
        return ExactOrder(data, dataset) if has_order else OtherData(data)
    if dataset is None or _may_change_between_epochs(dataset):
        return OtherData(data)
    return OrderedBatches(data, seed, rank)


def _may_change_between_epochs(dataset: keras.utils.PyDataset) -> bool:
    """Returns whether a PyDataset has code that may change what its batches contain."""
    kind = type(dataset)
    base = keras.utils.PyDataset
    return (
        kind.on_epoch_begin is not base.on_epoch_begin or kind.on_epoch_end is not base.on_epoch_end
    )


class ShuffledArrays(EpochData):
    """Arrays that `fit` shuffles, in an order of seed, rank and epoch."""

    def __init__(self, data: private_api.RunningFitData, seed: int, rank: int):
        """Builds the dataset, which reads the number of the epoch when the epoch begins."""
        super().__init__(data)
        with tf.device("CPU:0"):
            self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="epoch")
        key = tf.constant(_rank_seed(seed, rank), tf.int64)

        def shuffle(indices: tf.Tensor) -> tf.Tensor:
            epoch_seed = tf.stack([key, self._epoch.read_value()])
            return tf.random.experimental.stateless_shuffle(indices, epoch_seed)

        self._dataset = data.array_dataset(shuffle)

    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        self._epoch.assign(epoch)
        _set_rest(self._data, self._dataset, first_batch)


class UnshuffledArrays(EpochData):
    """Arrays in their own order."""

    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        _set_rest(self._data, self._data.dataset, first_batch)


class ExactOrder(EpochData):
    """Data of `hi.order`, whose sampler keeps its own position."""

    def __init__(self, data: private_api.RunningFitData, dataset: ExactDataset):
        """Keeps the dataset, whose sampler knows how many batches are left."""
        super().__init__(data)
        self._dataset = dataset

    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        """Sets the number of batches that are left.

        Otherwise `fit` would begin one step more, whose random layers would draw numbers before the
        step finds no data.
        """
        self._data.set_epoch(self._data.dataset, len(self._dataset.sampler))


class OtherData(EpochData):
    """Data whose order may be different each time, such as a tf.data.Dataset or a generator."""

    is_exact = False

    def __init__(self, data: private_api.RunningFitData):
        """Begins with the first batch."""
        super().__init__(data)
        self.continues_over_epochs = data.continues_over_epochs
        self._has_skipped = False

    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        """Skips batches if `skip_batches` of `Checkpoint` asks for it, and none in later epochs."""
        if first_batch or self._has_skipped:
            _set_rest(self._data, self._data.dataset, first_batch)
        self._has_skipped = first_batch > 0


class OrderedBatches(EpochData):
    """A PyDataset, whose batches come in an order of seed, rank and epoch if `fit` shuffles them.

    A PyDataset with its own `on_epoch_begin` or `on_epoch_end` is `OtherData`, because these may
    change what a batch contains.
    """

    def __init__(self, data: private_api.RunningFitData, seed: int, rank: int):
        """Replaces the PyDataset by one that returns its batches in this order."""
        super().__init__(data)
        assert data.py_dataset is not None
        self._shuffles = data.are_shuffled
        self._seed = _rank_seed(seed, rank)
        self._rest = _BatchesInOrder(data.py_dataset)
        data.replace_py_dataset(self._rest)

    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        indices = list(range(self._data.num_batches or 0))
        if self._shuffles:
            random.Random(f"{self._seed} {epoch}").shuffle(indices)
        self._rest.indices = indices[first_batch:]
        self._data.set_epoch(self._data.dataset, len(self._rest.indices))


class _BatchesInOrder(keras.utils.PyDataset):
    """Batches of a PyDataset in a given order.

    Attributes:
      indices: Numbers of the batches, in the order in which they are read.
      batch_size: Examples in a batch, from which LARS derives its trust coefficient; None if the
        dataset does not say.
    """

    def __init__(self, dataset: keras.utils.PyDataset):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self.indices = list(range(dataset.num_batches))
        self.batch_size = getattr(dataset, "batch_size", None)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self.indices[index]]


def _rank_seed(seed: int, rank: int) -> int:
    """Returns a seed that is different on each rank."""
    return random.Random(f"{seed} {rank}").randrange(_SEED_LIMIT)


def _set_rest(data: private_api.RunningFitData, dataset: tf.data.Dataset, first_batch: int) -> None:
    """Makes the next epoch begin with a batch of a dataset."""
    num_batches = data.num_batches
    rest = dataset.skip(first_batch) if first_batch else dataset
    data.set_epoch(rest, None if num_batches is None else num_batches - first_batch)
