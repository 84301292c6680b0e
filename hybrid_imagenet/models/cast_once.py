"""Casts the kernels of all convolutions in one pass over them: on a GPU each cast of its own is a kernel to start."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from hybrid_imagenet import xla

_held: contextvars.ContextVar[Mapping[int, tf.Tensor] | None] = contextvars.ContextVar("kernels", default=None)


def value(kernel: keras.Variable) -> tf.Tensor:
    """Returns a layer's kernel in its compute type."""
    found = (_held.get() or {}).get(id(kernel))
    return tf.convert_to_tensor(kernel) if found is None else found


@contextlib.contextmanager
def together(kernels: Sequence[tuple[keras.Variable, str]]) -> Iterator[Mapping[int, tf.Tensor]]:
    """Casts kernels; inside, `value` gives parts of the one vector, which are yielded by the variable's identity.

    A gradient is to be taken for these parts: it does not reach the variables.

    Args:
      kernels: variables with the compute type of their layers; may be none.
    """
    found: dict[int, tf.Tensor] = {}
    for dtype in sorted({dtype for _, dtype in kernels}):
        found |= _cast([kernel for kernel, wanted in kernels if wanted == dtype], dtype)
    token = _held.set(found)
    try:
        yield found
    finally:
        _held.reset(token)


def _cast(kernels: Sequence[keras.Variable], dtype: str) -> dict[int, tf.Tensor]:
    def joined(*values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.concat([tf.reshape(value, [-1]) for value in values], 0), dtype)

    # Parts that begin and end at multiples of 64 bytes are views, not copies.
    parts = tf.split(xla.on_gpu(joined)(*(k.value for k in kernels)), [math.prod(k.shape) for k in kernels])
    return {id(k): tf.reshape(part, k.shape) for k, part in zip(kernels, parts, strict=True)}
