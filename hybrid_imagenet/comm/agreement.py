"""Compares values over ranks, such as weights, and names the ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.errors import EXIT_USAGE, SharedError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def check_agreement(
    communicator: Communicator,
    values: Mapping[str, Any],
    when: str,
    remedy: str,
    exit_code: int = EXIT_USAGE,
) -> None:
    """Compares values over ranks; every rank calls it.

    Args:
      communicator: Connects the ranks.
      values: This rank's values by name, JSON-ready; all ranks pass the same names.
      when: How the message begins, such as "before the first step".
      remedy: How the message ends.
      exit_code: That of the error.

    Raises:
      SharedError: On all ranks, with each name whose values differ, the values, and the ranks that
        have them.
    """
    rows = communicator.allgather_object({name: str(value) for name, value in values.items()})
    differences = []
    for name in rows[0]:
        ranks_by_value: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            ranks_by_value.setdefault(row[name], []).append(str(rank))
        if len(ranks_by_value) > 1:
            listed = [
                f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_by_value.items()
            ]
            differences.append(f"{name} ({'; '.join(listed)})")
    if differences:
        message = f"{when} the ranks differ in {' and '.join(differences)}: {remedy}"
        raise SharedError(message, exit_code)


def digest(variables: Sequence[keras.Variable]) -> str:
    """Returns a checksum of variables' values in 16 hexadecimal digits; waits for the device."""
    return f"{int(checksum(variables)) % 2**64:016x}"


def checksum(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Sums the bit patterns of variables modulo 2^64, which does not depend on the order.

    Args:
      variables: Variables of any numeric dtype. Each variable counts with its own odd factor, so
        that an exchange of two variables changes the sum.

    Returns:
      int64 scalar.
    """
    import tensorflow as tf

    integers = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
    total = tf.constant(0, tf.int64)
    for i, variable in enumerate(variables):
        value = variable.value
        if value.dtype.is_bool:
            pattern = tf.cast(value, tf.int8)
        else:
            pattern = tf.bitcast(value, integers[value.dtype.size])
        total += (2 * i + 1) * tf.reduce_sum(tf.cast(pattern, tf.int64))
    return total
