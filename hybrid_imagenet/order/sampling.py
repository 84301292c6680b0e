"""Computes the order of the examples: any position directly, without replay of the earlier ones.

Any position of any epoch's order is found in constant time and memory, so a run starts at any
`Cursor` without reading or computing what came before, and each rank works out only its own share.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]

REMAINDERS = ("wrap", "drop")
_HALF_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64
_MASK = (1 << 64) - 1


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele et al., OOPSLA 2014): a bijection that scatters
    64-bit words.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys(seed: int, stream: int, count: int = _HALF_ROUNDS) -> npt.NDArray[np.uint64]:
    """`count` 64-bit keys, by default those of `permute`, uint64 [count], for one stream (an epoch,
    say) of a seed.
    """
    start = mix(np.array([(seed + _GOLDEN) & _MASK], np.uint64))[0]
    start = mix(np.array([(int(start) + (stream + 1) * _GOLDEN) & _MASK], np.uint64))[0]
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(start + steps)


def permute(positions: Indices, count: int, round_keys: npt.NDArray[np.uint64]) -> Indices:
    """The places (int64 [k]) of some positions in a pseudo-random permutation of [0, count), from
    `keys`.

    A generalized Feistel network with cycle walking (Black and Rogaway, CT-RSA 2002): exact for
    every count.
    """
    result = _feistel(positions, count, round_keys)
    while (
        outside := result >= count
    ).any():  # cycle walking: follow the orbit back into the domain
        result[outside] = _feistel(result[outside], count, round_keys)
    return result


def _feistel(positions: Indices, count: int, round_keys: npt.NDArray[np.uint64]) -> Indices:
    """A permutation of [0, width * height), a rectangle that just holds `count`."""
    width = math.isqrt(count - 1) + 1
    height = -(-count // width)
    values = positions.astype(np.uint64)
    high, low = values // np.uint64(width), values % np.uint64(width)
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            low = (low + mix(high ^ key) % np.uint64(width)) % np.uint64(width)
        else:
            high = (high + mix(low ^ key) % np.uint64(height)) % np.uint64(height)
    return (high * np.uint64(width) + low).astype(np.int64)


@dataclasses.dataclass(frozen=True, order=True)
class Cursor:
    """A place in the stream of examples: `offset` examples of `epoch` (both from 0) have been
    consumed.
    """

    epoch: int = 0
    offset: int = 0


class SampleOrder:
    """The shuffled order of `num_examples` examples, epoch after epoch, as a function of (seed,
    epoch) only.

    Each epoch is a pseudo-random permutation (`permute`): exact for every number of examples, and
    independent of NumPy's generators, whose streams may change between versions.

    Args:
      num_examples: size of the dataset, at least 1.
      seed: non-negative seed of the order.
      remainder: `wrap` fills the last batch of an epoch from the next one, so that every example
        occurs exactly once per epoch; `drop` leaves out the examples of an epoch that do not fill a
        batch (see `left_out`).
      shuffle: False gives the examples in their stored order.

    Attributes:
      window: shards that are mixed at a time; 0 where all examples are mixed.

    Raises:
      ValueError: for an empty dataset or an unknown remainder policy.
    """

    window = 0

    def __init__(
        self, num_examples: int, seed: int = 0, remainder: str = "wrap", *, shuffle: bool = True
    ) -> None:
        if num_examples < 1:
            raise ValueError(f"num_examples={num_examples}: a dataset needs at least one example")
        if remainder not in REMAINDERS:
            raise ValueError(f"remainder={remainder!r}: choose one of {', '.join(REMAINDERS)}")
        self.num_examples = num_examples
        self.seed = seed
        self.remainder = remainder
        self.shuffle = shuffle
        self._epoch_keys = functools.lru_cache(maxsize=8)(lambda epoch: keys(seed, epoch))

    def share(
        self, cursor: Cursor, count: int, rank: int = 0, size: int = 1
    ) -> tuple[Indices, Indices]:
        """Rank `rank`'s contiguous part of the next `count` examples.

        Returns:
          (examples, epochs): int64 [count / size] each; the epochs differ where a wrapped batch
          spans two.

        Raises:
          ValueError: if a batch exceeds the dataset under `drop`.
        """
        start = self._settled(cursor, count)
        own = count // size
        linear = start.offset + rank * own + np.arange(own, dtype=np.int64)
        epochs = start.epoch + linear // self.num_examples
        positions = linear % self.num_examples
        examples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            examples[here] = self.at(int(epoch), positions[here])
        return examples, epochs

    def advance(self, cursor: Cursor, count: int, batches: int = 1) -> Cursor:
        """The cursor after `batches` batches of `count` examples, in constant time."""
        start = self._settled(cursor, count)
        if self.remainder == "wrap":
            epochs, offset = divmod(start.offset + batches * count, self.num_examples)
            return Cursor(start.epoch + epochs, offset)
        left = (self.num_examples - start.offset) // count
        if batches < left:
            return Cursor(start.epoch, start.offset + batches * count)
        epochs, rest = divmod(batches - left, self.num_examples // count)
        return Cursor(start.epoch + 1 + epochs, rest * count)

    def batches_in_epoch(self, count: int, offset: int = 0) -> int:
        """Counts the batches of `count` that begin in an epoch of which `offset` examples are
        already consumed.
        """
        rest = self.num_examples - offset
        return rest // count if self.remainder == "drop" else -(-rest // count)

    def left_out(self, count: int, offset: int = 0) -> int:
        """Examples of an epoch, entered at `offset`, that no batch of `count` holds: 0 under
        `wrap`.
        """
        return (self.num_examples - offset) % count if self.remainder == "drop" else 0

    def position(self, cursor: Cursor) -> float:
        """The cursor as a fractional number of epochs from the start of training."""
        return cursor.epoch + cursor.offset / self.num_examples

    def at(self, epoch: int, positions: Indices) -> Indices:
        """The example numbers at some positions (int64 [k], each in [0, num_examples)) of an
        epoch's order.
        """
        if not self.shuffle:
            return positions.astype(np.int64)
        return permute(positions, self.num_examples, self._epoch_keys(epoch))

    def shards_ahead(self, cursor: Cursor) -> tuple[int, ...]:
        """The shards that are read at a cursor and soon after it, where the order keeps to some;
        here none.
        """
        del cursor
        return ()

    def _settled(self, cursor: Cursor, count: int) -> Cursor:
        """The cursor at which the next batch really starts: the next epoch where `drop` leaves out
        the rest.
        """
        if self.remainder == "wrap":
            return cursor
        if count > self.num_examples:
            raise ValueError(f"a batch of {count} is larger than the {self.num_examples} examples")
        return cursor if self.num_examples - cursor.offset >= count else Cursor(cursor.epoch + 1, 0)


def padded_share(
    num_examples: int, step: int, batch: int, rank: int = 0, size: int = 1
) -> tuple[Indices, Weights]:
    """Rank `rank`'s batch of a step of one pass in stored order, in which each example has weight 1
    exactly once.

    Returns:
      (examples, weights): int64 and float32 [batch]; padding is example 0 with weight 0.
    """
    positions = (step * size + rank) * batch + np.arange(batch, dtype=np.int64)
    real = positions < num_examples
    return np.where(real, positions, 0), real.astype(np.float32)


def seeds(seed: int, epochs: Indices, examples: Indices) -> Indices:
    """Two 64-bit seeds per example, int64 [k, 2], as a function of (seed, epoch, example) only."""
    base = np.uint64(keys(seed, -2, 1)[0])
    first = mix(base + epochs.astype(np.uint64) * np.uint64(_GOLDEN))
    first = mix(first ^ (examples.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    return np.stack([first, mix(first ^ np.uint64(0x5851F42D4C957F2D))], axis=1).astype(np.int64)


def uniforms(seed_pairs: Indices, count: int, start: int = 0) -> npt.NDArray[np.float32]:
    """Independent uniform numbers in [0, 1), float32 [k, count], from seeds of shape int64 [k, 2].

    `start` chooses a stream: draws [start, start + count) of each example. The device computes the
    same numbers (`data.device.uniforms`).
    """
    steps = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    pairs = seed_pairs.astype(np.uint64)
    words = mix(mix(pairs[:, :1] + steps) ^ pairs[:, 1:])
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).astype(np.float32)
