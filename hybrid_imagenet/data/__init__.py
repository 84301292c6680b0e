"""Provides datasets: sources of images, decoding, augmentation and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hybrid_imagenet.data.datasets import SPLITS, DatasetRequest
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import notes

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["SPLITS", "DatasetRequest", "Source", "digits", "open_source", "shard"]


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Loads 1,797 handwritten digits, which come with the package.

    They need no download and fit examples and tests. The test images are those that
    `--dataset=digits` validates with. TensorFlow is not imported.

    Example:
      (x_train, y_train), (x_test, y_test) = hi.data.digits()

    Returns:
      `(x_train, y_train), (x_test, y_test)`. Images are uint8 [1500, 8, 8] for training and
      uint8 [297, 8, 8] for tests, with values from 0 to 16, so divide them by 16. Classes are
      uint8 [1500] and [297], from 0 to 9. Each class has the same share of both parts.

    Reference:
      E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits. UCI Machine Learning
      Repository, 1998. https://doi.org/10.24432/C50P49
    """
    from hybrid_imagenet.data.sources import digits as source

    return source.load_splits()


def open_source(
    name: str, data_dir: str | None = None, split: str = "train", **options: Any
) -> Source:
    """Opens one split of a dataset.

    Args:
      name: name of the dataset, as for `--dataset`.
      data_dir: directory or URL of the dataset.
      split: "train" or "validation".
      **options: other attributes of `DatasetRequest`.

    Raises:
      UserError: if there is no such dataset or it cannot be used.
    """
    return DatasetRequest(name, data_dir, split, **options).open()


def shard(data: Any, rank: int, size: int, *, remainder: Literal["drop", "keep"] = "drop") -> Any:
    """Returns this rank's part of the data.

    The part is every `size`-th element, from number `rank` on.

    Shuffle and batch after it, or shuffle before it with the same seed on all ranks. The ranks'
    parts are disjoint only if all ranks pass the same elements in the same order. `shard` itself
    does not communicate, so it may be called at any time and on any rank. The ranks compare what
    they passed when `fit` starts, in `hybrid_imagenet.broadcast_model`, at an optimizer's first
    step and in `evaluate` with `MetricAverage`, and stop with an error if it differs. They compare
    seeds of shuffles and a sample of arrays, but not what Python generators yield.

    Example:
      x, y = hi.data.shard((x, y), hi.rank(), hi.size())

    Args:
      data: a `tf.data.Dataset`, or arrays of the same length in any nesting of tuples, lists and
        dictionaries.
      rank: number of this process, from 0.
      size: number of processes.
      remainder: `drop` omits the last elements if they are too few for all ranks, so that all ranks
        make the same number of steps; `keep` gives them to the first ranks, so that validation sees
        each element once.

    Returns:
      This rank's part, in the same form.

    Raises:
      UserError: if the rank does not exist; the data has another type; arrays have different
        lengths; there are fewer elements than ranks; or the order of a `tf.data.Dataset` is certain
        to differ between ranks, because it shuffles without a seed or is not deterministic.
    """
    # Imported late, because opening a source does not need TensorFlow.
    import tensorflow as tf

    if not 0 <= rank < size or remainder not in ("drop", "keep"):
        raise UserError(
            f"shard was called with rank={rank}, size={size}, remainder={remainder}. Pass"
            ' 0 <= rank < size, and remainder="drop" or "keep".'
        )
    if isinstance(data, tf.data.Dataset):
        return _shard_dataset(data, rank, size, remainder)
    return _shard_arrays(data, rank, size, remainder)


def _shard_arrays(data: Any, rank: int, size: int, remainder: str) -> Any:
    import tensorflow as tf

    from hybrid_imagenet.data import fingerprint

    arrays = tf.nest.flatten(data)
    for array in arrays:
        if not (hasattr(array, "__array__") and array.shape):
            raise UserError(
                f"shard does not support data of type {type(array).__name__}. Pass arrays"
                " (numpy.asarray of a list) or a tf.data.Dataset. Make a generator or a PyDataset"
                " on each rank from the rank's part of the examples."
            )
    lengths = {len(array) for array in arrays}
    if len(lengths) != 1:
        raise UserError(
            f"shard was called with arrays of different lengths"
            f" ({', '.join(map(str, sorted(lengths)))}). Pass arrays of the same length."
        )
    count = lengths.pop()
    _check_count(count, size)
    if size > 1:
        facts = fingerprint.fingerprint_arrays([np.asarray(array) for array in arrays])
        notes.add(notes.ShardNote(rank, size, facts))
    end = count // size * size if remainder == "drop" else count
    return tf.nest.map_structure(lambda array: np.asarray(array)[rank:end:size], data)


def _shard_dataset(data: tf.data.Dataset, rank: int, size: int, remainder: str) -> tf.data.Dataset:
    import tensorflow as tf

    from hybrid_imagenet.data import fingerprint

    if size > 1:
        notes.add(notes.ShardNote(rank, size, fingerprint.fingerprint_dataset(data)))
    count = int(data.cardinality())
    if count >= 0:
        _check_count(count, size)
        data = data.take(count // size * size) if remainder == "drop" else data
    elif remainder == "drop" and count == tf.data.UNKNOWN_CARDINALITY:
        # The number of elements is unknown, so the remainder shows only at the end. Therefore the
        # elements are grouped into rounds of one element per rank, and an incomplete round is
        # dropped.
        rounds = data.window(size, drop_remainder=True)
        element_of_rank = tf.autograph.experimental.do_not_convert(
            lambda *components: _elements_of_round(components).skip(rank).take(1)
        )
        return rounds.flat_map(element_of_rank)
    return data.shard(size, rank)


def _elements_of_round(components: Any) -> tf.data.Dataset:
    """Returns the elements of one round as a dataset.

    `window` yields a separate dataset for each component of the elements.
    """
    import tensorflow as tf

    structure = components[0] if len(components) == 1 else components
    if isinstance(structure, tf.data.Dataset):
        return structure
    return tf.data.Dataset.zip(structure)


def _check_count(count: int, size: int) -> None:
    if count < size:
        raise UserError(
            f"shard was called with {count} elements for {size} ranks. Pass at least one element"
            " for each rank."
        )
