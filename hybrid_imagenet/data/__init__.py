"""Provides data sets: sources of encoded images, their order, decoding and augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hybrid_imagenet.data.datasets import SPLITS, DatasetRequest
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import notes

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["SPLITS", "DatasetRequest", "Source", "open_source", "shard"]


def open_source(
    name: str, data_dir: str | None = None, split: str = "train", **options: Any
) -> Source:
    """Opens one split of a data set.

    Args:
      name, data_dir, split, options: the attributes of `DatasetRequest`.

    Raises:
      UserError: if there is no such data set or it cannot be used.
    """
    return DatasetRequest(name, data_dir, split, **options).open()


def shard(data: Any, rank: int, size: int, *, remainder: Literal["drop", "keep"] = "drop") -> Any:
    """Returns every `size`-th element, from number `rank` on.

    Shuffle and batch after it, or shuffle before it with the same seed on all ranks. The ranks'
    parts are disjoint only if all ranks pass the same elements in the same order. `shard` itself
    does not communicate, so it may be called at any time and on any rank. The ranks compare what
    they passed when `fit` starts, in `hybrid_imagenet.broadcast_model`, at an optimizer's first
    step and in `evaluate` with `MetricAverage`, and stop with an error if it differs. They compare
    seeds of shuffles and a sample of arrays, but not what Python generators yield.

    Args:
      data: a `tf.data.Dataset`, or arrays in any nesting of tuples, lists and dictionaries that
      have one length.
      rank: of this process, from 0.
      size: number of processes.
      remainder: `drop` omits the last elements if they are too few for all ranks, so that all make
        as many steps; `keep` gives them to the first ranks, so that a validation sees each element
        once.

    Returns:
      The share, in the same form.

    Raises:
      UserError: for a rank that does not exist, data of another kind, arrays of different lengths,
        fewer elements than ranks, or a `tf.data.Dataset` whose order is certain to differ between
        ranks, because it shuffles without a seed or is not deterministic.
    """
    import tensorflow as tf  # which sources do not need

    from hybrid_imagenet.data import fingerprint

    if not 0 <= rank < size or remainder not in ("drop", "keep"):
        raise UserError(
            f"rank={rank}, size={size}, remainder={remainder}: give 0 <= rank < size, and drop or"
            " keep"
        )
    if isinstance(data, tf.data.Dataset):
        return _shard_of_dataset(data, rank, size, remainder)
    arrays = tf.nest.flatten(data)
    other = next(
        (type(x).__name__ for x in arrays if not (hasattr(x, "__array__") and x.shape)), None
    )
    if other is not None:
        raise UserError(
            f"{other}: cannot be shared out: give arrays (numpy.asarray of a list) or a"
            " tf.data.Dataset; make a generator or a PyDataset on each rank, of the rank's share"
            " of the examples"
        )
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise UserError(
            f"arrays of different lengths ({', '.join(map(str, sorted(lengths)))}): give them one"
            " length"
        )
    count = lengths.pop()
    _check_count(count, size)
    if size > 1:
        notes.add(
            notes.Note(rank, size, fingerprint.of_arrays([np.asarray(array) for array in arrays]))
        )
    end = count // size * size if remainder == "drop" else count
    return tf.nest.map_structure(lambda array: np.asarray(array)[rank:end:size], data)


def _shard_of_dataset(
    data: tf.data.Dataset, rank: int, size: int, remainder: str
) -> tf.data.Dataset:
    import tensorflow as tf

    from hybrid_imagenet.data import fingerprint

    if size > 1:
        notes.add(notes.Note(rank, size, fingerprint.of_dataset(data)))
    count = int(data.cardinality())
    if count >= 0:
        _check_count(count, size)
        data = data.take(count // size * size) if remainder == "drop" else data
    elif remainder == "drop" and count == tf.data.UNKNOWN_CARDINALITY:
        # Only whole rounds of elements, one for each rank, of which this rank takes its own.
        rounds = data.window(size, drop_remainder=True)
        own = tf.autograph.experimental.do_not_convert(
            lambda *parts: _together(parts).skip(rank).take(1)
        )
        return rounds.flat_map(own)
    return data.shard(size, rank)


def _together(parts: Any) -> tf.data.Dataset:
    """Returns the elements of one round, which `window` takes apart into a data set for each
    component.
    """
    import tensorflow as tf

    found = parts[0] if len(parts) == 1 else parts
    return found if isinstance(found, tf.data.Dataset) else tf.data.Dataset.zip(found)


def _check_count(count: int, size: int) -> None:
    if count < size:
        raise UserError(f"{count} elements for {size} ranks: give at least one for each")
