"""Counts the images of each class, for weights that make up for classes of unequal size."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.data.sources.source import BadRecord, Source
from hybrid_imagenet.errors import UserError

MAX_READ_EXAMPLES = 100_000
"""Number of examples that are read for their labels, in seconds to minutes at each start."""
_READ_THREADS = 8


def check_readable(dataset: str, num_examples: int) -> None:
    """Raises UserError if a dataset is too large to be read whole for its labels.

    Args:
      dataset: --dataset, whose labels are stored together with the images.
      num_examples: Number of its training images.
    """
    if num_examples > MAX_READ_EXAMPLES:
        raise UserError(
            f"--class_weights=balanced needs the label of each training image, and"
            f" --dataset={dataset} stores labels together with images. Up to {MAX_READ_EXAMPLES:,}"
            f" images are read for that at the start, but there are {num_examples:,}. Omit the"
            " flag, or store the images as a folder, as tar files (webdataset) or as Parquet files"
            " on this host."
        )


def count_classes(source: Source, dataset: str) -> npt.NDArray[np.int64]:
    """Returns the number of examples of each class, int64 [num_classes].

    Bad records are not counted.

    Args:
      source: The training examples.
      dataset: --dataset, for the error.

    Raises:
      UserError: If all images would have to be read, and are too many.
    """
    labels = source.stored_labels()
    if labels is None:
        check_readable(dataset, source.num_examples)
        labels = _read_labels(source)
    is_class = (labels >= 0) & (labels < source.num_classes)
    return np.bincount(labels[is_class], minlength=source.num_classes).astype(np.int64)


def _read_labels(source: Source) -> npt.NDArray[np.int64]:
    def label_of(index: int) -> int:
        try:
            return source.read_one(index)[1]
        except BadRecord:
            return -1

    with concurrent.futures.ThreadPoolExecutor(_READ_THREADS) as pool:
        labels = list(pool.map(label_of, range(source.num_examples)))
    return np.array(labels, np.int64)


def balanced_weights(class_sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns a weight for each class with which all classes count alike, float32 [num_classes].

    It is n / (K n_c) for n examples of K classes, n_c of which are of class c: the `balanced`
    weights of scikit-learn. Their mean over all examples is 1. Classes without examples do not
    count in K and have the weight 0, which is never used.

    Args:
      class_sizes: Number of examples of each class, int64 [num_classes].
    """
    num_classes = np.count_nonzero(class_sizes)
    weights = class_sizes.sum() / (num_classes * np.maximum(class_sizes, 1))
    return np.where(class_sizes > 0, weights, 0.0).astype(np.float32)


def describe_weights(weights: npt.NDArray[np.float32], names: tuple[str, ...]) -> str:
    """Describes the weights of the largest and the smallest class in one line."""
    smallest_weight = int(np.argmin(np.where(weights > 0, weights, np.inf)))
    largest_weight = int(np.argmax(weights))
    return (
        f"class weights: from {weights[smallest_weight]:.3g} (class {names[smallest_weight]}) to"
        f" {weights[largest_weight]:.3g} (class {names[largest_weight]})"
    )
