"""Computes the order of the examples without replaying earlier positions.

Any position of any epoch's order is computed in constant time and memory. So a run starts at any
`Cursor` without reading or computing earlier examples, and each rank computes only its own slice.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]

# Half rounds of the Feistel network; one key each.
_HALF_ROUNDS = 8
# 2^64 divided by the golden ratio, the increment of SplitMix64.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64_BITS = (1 << 64) - 1
# The stream of `keys` from which `seeds` draws. Epochs use the streams from 0 on, and the order of
# shards those below -2.
_SEEDS_STREAM = -2


@dataclasses.dataclass(frozen=True, order=True)
class Cursor:
    """Names a position in the stream of examples.

    Attributes:
      epoch: The current epoch, from 0.
      offset: Examples of that epoch that are consumed.
    """

    epoch: int = 0
    offset: int = 0


class SampleOrder:
    """Shuffles the examples of each epoch, as a function of only (seed, epoch).

    Each epoch is a pseudo-random permutation (`permute`). It is exact for every number of examples
    and independent of NumPy's generators, whose streams may change between versions. The last batch
    of an epoch is filled from the next epoch, so that every example occurs exactly once per epoch.

    Args:
      num_examples: Size of the dataset, at least 1.
      seed: Non-negative seed of the order.
      shuffle: False keeps the examples in their stored order.

    Attributes:
      window: Number of shards that are mixed at a time; 0 if all examples are mixed.

    Raises:
      ValueError: For an empty dataset.
    """

    window = 0

    def __init__(self, num_examples: int, seed: int = 0, *, shuffle: bool = True) -> None:
        if num_examples < 1:
            raise ValueError(f"num_examples={num_examples}: a dataset needs at least one example")
        self.num_examples = num_examples
        self.seed = seed
        self.shuffle = shuffle
        self._epoch_keys = functools.lru_cache(maxsize=8)(lambda epoch: keys(seed, epoch))

    def rank_slice(
        self, cursor: Cursor, count: int, rank: int = 0, size: int = 1
    ) -> tuple[Indices, Indices]:
        """Returns a rank's contiguous slice of the next `count` examples.

        Args:
          cursor: The next example.
          count: Examples of all ranks, a multiple of `size`.
          rank: Rank whose slice is returned.
          size: Number of ranks.

        Returns:
          (examples, epochs): int64 [count / size] each. The epochs differ if the batch spans
          several.
        """
        slice_length = count // size
        first = cursor.offset + rank * slice_length
        # Positions count on over the ends of epochs.
        positions = first + np.arange(slice_length, dtype=np.int64)
        epochs = cursor.epoch + positions // self.num_examples
        positions_in_epoch = positions % self.num_examples
        examples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            examples[in_epoch] = self.at(int(epoch), positions_in_epoch[in_epoch])
        return examples, epochs

    def advance(self, cursor: Cursor, count: int, batches: int = 1) -> Cursor:
        """Returns the cursor after `batches` batches of `count` examples, in constant time."""
        epochs, offset = divmod(cursor.offset + batches * count, self.num_examples)
        return Cursor(cursor.epoch + epochs, offset)

    def batches_in_epoch(self, count: int, offset: int = 0) -> int:
        """Returns the number of batches that begin in an epoch.

        Args:
          count: Examples per batch.
          offset: Examples of the epoch that are already consumed.
        """
        return -(-(self.num_examples - offset) // count)

    def position(self, cursor: Cursor) -> float:
        """Returns the cursor as a fractional number of epochs since the start of training."""
        return cursor.epoch + cursor.offset / self.num_examples

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Returns the example numbers at positions of an epoch's order.

        Args:
          epoch: Epoch from 0.
          positions: int64 [k], each in [0, num_examples).

        Returns:
          int64 [k].
        """
        if not self.shuffle:
            return positions.astype(np.int64)
        return permute(positions, self.num_examples, self._epoch_keys(epoch))

    def shards_ahead(self, cursor: Cursor) -> tuple[int, ...]:
        """Returns the shards that are read at a cursor and soon after it.

        This order reads from all shards at any time, so there are none to name.
        """
        del cursor
        return ()


def padded_rank_slice(
    num_examples: int, step: int, batch: int, rank: int = 0, size: int = 1
) -> tuple[Indices, Weights]:
    """Returns a rank's batch of one pass in stored order, in which each example counts once.

    Args:
      num_examples: Size of the dataset.
      step: Step of the pass, from 0.
      batch: Examples per rank and step.
      rank: Rank whose batch is returned.
      size: Number of ranks.

    Returns:
      (examples, weights): int64 and float32 [batch]. Weights are 1; padding is example 0 with
      weight 0.
    """
    positions = (step * size + rank) * batch + np.arange(batch, dtype=np.int64)
    is_example = positions < num_examples
    return np.where(is_example, positions, 0), is_example.astype(np.float32)


def permute(positions: Indices, count: int, round_keys: npt.NDArray[np.uint64]) -> Indices:
    """Returns where a pseudo-random permutation of [0, count) maps positions.

    It is a generalized Feistel network with cycle walking: exact for every count.

    Args:
      positions: int64 [k].
      count: Size of the permutation.
      round_keys: Round keys from `keys`.

    Returns:
      int64 [k].

    Reference:
      Black and Rogaway, CT-RSA 2002.
    """
    result = _feistel(positions, count, round_keys)
    # Cycle walking: values outside of the domain are mapped again, until they are inside.
    outside = result >= count
    while outside.any():
        result[outside] = _feistel(result[outside], count, round_keys)
        outside = result >= count
    return result


def _feistel(positions: Indices, count: int, round_keys: npt.NDArray[np.uint64]) -> Indices:
    """Permutes [0, width * height), the smallest near-square rectangle with `count` cells."""
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    values = positions.astype(np.uint64)
    high = values // np.uint64(width)
    low = values % np.uint64(width)
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            low = (low + mix(high ^ key) % np.uint64(width)) % np.uint64(width)
        else:
            high = (high + mix(low ^ key) % np.uint64(height)) % np.uint64(height)
    return (high * np.uint64(width) + low).astype(np.int64)


def keys(seed: int, stream: int, count: int = _HALF_ROUNDS) -> npt.NDArray[np.uint64]:
    """Returns 64-bit keys, uint64 [count].

    Args:
      seed: Non-negative.
      stream: Number of an independent stream of the seed, such as an epoch.
      count: Number of keys; by default those of `permute`.
    """
    start = mix(np.array([(seed + _GOLDEN) & _MASK_64_BITS], np.uint64))[0]
    start = mix(np.array([(int(start) + (stream + 1) * _GOLDEN) & _MASK_64_BITS], np.uint64))[0]
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(start + steps)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatters 64-bit words by a bijection, the output function of SplitMix64.

    Reference:
      Steele et al., OOPSLA 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seeds(seed: int, epochs: Indices, examples: Indices) -> Indices:
    """Returns two 64-bit seeds per example, as a function of only (seed, epoch, example).

    Args:
      seed: Non-negative seed of the run.
      epochs: int64 [k].
      examples: Example numbers, int64 [k].

    Returns:
      int64 [k, 2].
    """
    base = np.uint64(keys(seed, _SEEDS_STREAM, 1)[0])
    first = mix(base + epochs.astype(np.uint64) * np.uint64(_GOLDEN))
    first = mix(first ^ (examples.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    second = mix(first ^ np.uint64(0x5851F42D4C957F2D))
    return np.stack([first, second], axis=1).astype(np.int64)


def uniforms(seed_pairs: Indices, count: int, start: int = 0) -> npt.NDArray[np.float32]:
    """Returns independent uniform random numbers in [0, 1) for each example.

    The device computes the same numbers (`data.device.uniforms`).

    Args:
      seed_pairs: Seed pairs from `seeds`, int64 [k, 2].
      count: Random numbers per example.
      start: Returns numbers start to start + count of each example's stream.

    Returns:
      float32 [k, count].
    """
    steps = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    pairs = seed_pairs.astype(np.uint64)
    words = mix(mix(pairs[:, :1] + steps) ^ pairs[:, 1:])
    # The upper 24 bits fill the mantissa of a float32.
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).astype(np.float32)
