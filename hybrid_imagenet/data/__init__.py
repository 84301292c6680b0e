"""Divides data over ranks, and loads handwritten digits for examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import notes

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["digits", "shard"]


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


def shard(data: Any, rank: int, size: int, *, remainder: Literal["drop", "keep"] = "drop") -> Any:
    """Returns this rank's part of the data, which is every `size`-th element.

    The part begins with element number `rank`. Shuffle and batch it afterwards. You can also
    shuffle before, with the same seed on all ranks, because the parts are disjoint only if all
    ranks pass the same elements in the same order. Such a `tf.data.Dataset` has another order each
    time it is read, so then every rank must read it equally often: if one rank alone looks at a
    batch before `fit`, the parts overlap, and no error says so.

    `shard` itself does not communicate, so it may be called at any time and on any rank. The ranks
    compare what they passed when `fit` starts, in `hybrid_imagenet.broadcast_model`, at an
    optimizer's first step and in `hybrid_imagenet.evaluate`, and stop with an error if it differs.
    They compare seeds of shuffles and a sample of arrays, but not what Python generators yield.

    With 10 examples on 3 ranks, `shard(numpy.arange(10), rank, 3, remainder=...)` returns:

        remainder   rank 0         rank 1      rank 2
        "drop"      [0, 3, 6]      [1, 4, 7]   [2, 5, 8]
        "keep"      [0, 3, 6, 9]   [1, 4, 7]   [2, 5, 8]

    Example:
      x, y = hi.data.shard((x, y), hi.rank(), hi.size())
      validation = hi.data.shard((x_val, y_val), hi.rank(), hi.size(), remainder="keep")

    Args:
      data: Arrays [n, ...] of any dtype with the same n, in any nesting of tuples, lists and
        dictionaries; or a `tf.data.Dataset` of single examples with n elements of any structure.
      rank: Number of this process, from 0; usually `hi.rank()`.
      size: Number of processes; usually `hi.size()`.
      remainder: What to do with the last n % size elements. "drop" omits them, so that all ranks
        make the same number of steps; use it for training. "keep" gives one each to the first
        ranks, so that each element is used once; use it for validation (default: "drop").

    Returns:
      The part in the same form and dtypes: a `tf.data.Dataset`, or NumPy arrays [m, ...] in the
      same nesting. m is n // size, or n // size + 1 on the first n % size ranks with "keep".

    Raises:
      UserError: If the rank does not exist; the data has another type; arrays have different
        lengths; there are fewer elements than ranks; or the order of a `tf.data.Dataset` is certain
        to differ between ranks, because it shuffles without a seed or is not deterministic.
    """
    # Imported late, because `digits` does not need TensorFlow.
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
        is_tuple = isinstance(data.element_spec, tuple)

        @tf.autograph.experimental.do_not_convert
        def element_of_rank(*components: Any) -> tf.data.Dataset:
            structure = components if is_tuple else components[0]
            return _elements_of_round(structure).skip(rank).take(1)

        return data.window(size, drop_remainder=True).flat_map(element_of_rank)
    return data.shard(size, rank)


def _elements_of_round(structure: Any) -> tf.data.Dataset:
    """Returns the elements of one round as a dataset.

    Args:
      structure: Structure of an element, with a dataset instead of each tensor, as `window` yields
        it.
    """
    import tensorflow as tf

    if isinstance(structure, tf.data.Dataset):
        return structure
    return tf.data.Dataset.zip(structure)


def _check_count(count: int, size: int) -> None:
    if count < size:
        raise UserError(
            f"shard was called with {count} elements for {size} ranks. Pass at least one element"
            " for each rank."
        )
