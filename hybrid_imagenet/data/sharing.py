"""Gives each rank its share of data that a Keras model is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hybrid_imagenet.errors import UserError

Remainder = Literal["drop", "keep"]


def shard(data: Any, rank: int, size: int, *, remainder: Remainder = "drop") -> Any:
    """Every `size`-th element, from number `rank` on; shuffle and batch after it, or before it with one seed for all.

    Args:
      data: a `tf.data.Dataset`, or arrays in any nesting of tuples, lists and dictionaries that have one length.
      rank: of this process, from 0.
      size: number of processes.
      remainder: `drop` leaves out the last elements that are too few for all ranks, so that all make as many steps;
        `keep` gives them to the first ranks, so that a validation sees each element once.

    Returns:
      The share, in the same form.

    Raises:
      UserError: for a rank that does not exist, data of another kind, arrays of different lengths, or fewer elements
        than ranks.
    """
    if not 0 <= rank < size or remainder not in ("drop", "keep"):
        raise UserError(f"rank={rank}, size={size}, remainder={remainder}: give 0 <= rank < size, and drop or keep")
    if isinstance(data, tf.data.Dataset):
        return _of_dataset(data, rank, size, remainder)
    for array in tf.nest.flatten(data):
        _check_array(array)
    lengths = {len(array) for array in tf.nest.flatten(data)}
    if len(lengths) != 1:
        raise UserError(f"arrays of different lengths ({', '.join(map(str, sorted(lengths)))}): give them one length")
    count = lengths.pop()
    _check(count, size)
    end = count // size * size if remainder == "drop" else count
    return tf.nest.map_structure(lambda array: np.asarray(array)[rank:end:size], data)


def _of_dataset(data: tf.data.Dataset, rank: int, size: int, remainder: Remainder) -> tf.data.Dataset:
    count = int(data.cardinality())
    if count >= 0:
        _check(count, size)
        data = data.take(count // size * size) if remainder == "drop" else data
    elif remainder == "drop" and count == tf.data.UNKNOWN_CARDINALITY:
        # Only whole rounds of elements, one for each rank, of which this rank takes its own.
        rounds = data.window(size, drop_remainder=True)
        return rounds.flat_map(lambda *parts: _together(parts).skip(rank).take(1))
    return data.shard(size, rank)


def _together(parts: Any) -> tf.data.Dataset:
    """Returns the elements of one round, which `window` takes apart into a data set for each component."""
    found = parts[0] if len(parts) == 1 else parts
    return found if isinstance(found, tf.data.Dataset) else tf.data.Dataset.zip(found)


def _check_array(array: Any) -> None:
    """Refuses what has no elements to choose from: a number of a list, a generator, a `keras.utils.PyDataset`."""
    if hasattr(array, "__array__") and array.shape:
        return
    kind = type(array).__name__
    if isinstance(array, Iterator):
        raise UserError(
            f"a {kind} cannot be shared out: give each rank its own, as itertools.islice(it, hybrid_imagenet.rank(), "
            "None, hybrid_imagenet.size()), and fit steps_per_epoch"
        )
    if isinstance(array, (str, bytes, int, float)):
        raise UserError(f"a {kind} is no array: make one of the list, numpy.asarray(...)")
    raise UserError(
        f"a {kind} cannot be shared out: give arrays or a tf.data.Dataset, and make a PyDataset on each rank from the "
        "rank's share of the examples"
    )


def _check(count: int, size: int) -> None:
    if count < size:
        raise UserError(f"{count} elements for {size} ranks: give at least one for each")
