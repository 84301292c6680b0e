"""Checks that all ranks have divided the same examples in the same order.

Otherwise the parts of two ranks overlap, and both train on the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.order import notes

Facts = Mapping[str, Any]


def check_same_order(communicator: Communicator) -> None:
    """Compares how the ranks' data were ordered when they were divided over ranks.

    Every rank calls it. It covers the data that were divided since the last call. A rank may have
    divided more data than another, such as a validation set that only rank 0 uses.

    Raises:
      SharedError: On all ranks, with a rank whose order differs from that of rank 0, and the facts
        that differ.
    """
    if communicator.size == 1:
        return
    own_facts = notes.take(communicator.rank, communicator.size)
    first, *others = communicator.allgather_object(own_facts)
    for rank, facts in enumerate(others, 1):
        names = _first_difference(first, facts)
        if names:
            raise SharedError(
                f"Rank {rank} and rank 0 divide data in different orders: {' and '.join(names)}"
                " differ. The ranks would train on some examples twice and omit others. Load and"
                " shuffle the data with the same seed on all ranks, such as"
                " image_dataset_from_directory(seed=1), or shuffle after hi.data.shard. Call"
                " keras.utils.set_random_seed(seed + hi.rank()) only after hi.data.shard."
            )


def _first_difference(one: Sequence[Facts], other: Sequence[Facts]) -> list[str]:
    """Returns the names of the facts in which the notes of two ranks differ.

    Each note of the rank with fewer notes must equal another note of the other rank. For the first
    note that does not, the result has the names that differ from the most similar note.

    Returns:
      The names; none if the notes agree.
    """
    fewer, more = sorted([one, other], key=len)
    remaining = list(more)
    for facts in fewer:
        differences = [_differing_names(facts, candidate) for candidate in remaining]
        if [] not in differences:
            return min(differences, key=len)
        del remaining[differences.index([])]
    return []


def _differing_names(one: Facts, other: Facts) -> list[str]:
    """Returns the names of the facts that differ."""
    return [name for name in {**one, **other} if not _are_equal(one.get(name), other.get(name))]


def _are_equal(one: Any, other: Any) -> bool:
    """Returns whether two facts are equal, lists of numbers to three digits."""
    if not isinstance(one, list) or not isinstance(other, list):
        return bool(one == other)
    if len(one) != len(other):
        return False
    if all(isinstance(value, float) for value in [*one, *other]):
        size = max(map(abs, [*one, *other]), default=0.0)
        return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3 * size))
    return all(map(_are_equal, one, other))
