"""Finds ranks that share out differently ordered examples.

Such ranks would train on some examples of each other.
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

    Every rank calls it. It covers the data since the last call. A rank may have shared out more
    data than another, such as a validation set that rank 0 alone uses.

    Raises:
      SharedError: on all ranks, with a rank whose order differs from that of rank 0, and in what.
    """
    if communicator.size == 1:
        return
    own_facts = notes.take(communicator.rank, communicator.size)
    first, *others = communicator.allgather_object(own_facts)
    for rank, facts in enumerate(others, 1):
        names = _different(first, facts)
        if names:
            raise SharedError(
                f"Rank {rank} and rank 0 share out data in different orders: {' and '.join(names)}"
                " differ. The ranks would train on some examples twice and omit others. Load and"
                " shuffle the data with the same seed on all ranks, such as"
                " image_dataset_from_directory(seed=1), or shuffle after hi.data.shard. Call"
                " keras.utils.set_random_seed(seed + hi.rank()) only after hi.data.shard."
            )


def _different(one: Sequence[Facts], other: Sequence[Facts]) -> list[str]:
    """Returns the names of facts that differ.

    Nothing differs if the longer list has everything that the shorter one has.
    """
    shorter, longer = sorted([one, other], key=len)
    candidates = list(longer)
    for facts in shorter:
        differences = [_differing_names(facts, candidate) for candidate in candidates]
        if [] not in differences:
            return min(differences, key=len)
        del candidates[differences.index([])]
    return []


def _differing_names(one: Facts, other: Facts) -> list[str]:
    """Returns the names of the facts that differ."""
    return [name for name in {**one, **other} if not _alike(one.get(name), other.get(name))]


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two facts are equal, lists of numbers to three digits."""
    if not isinstance(one, list) or not isinstance(other, list):
        return bool(one == other)
    if len(one) != len(other):
        return False
    if all(isinstance(value, float) for value in [*one, *other]):
        size = max(map(abs, [*one, *other]), default=0.0)
        return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3 * size))
    return all(map(_alike, one, other))
