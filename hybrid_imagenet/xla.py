"""Compiles parts of a training step with XLA on a GPU, to launch fewer kernels."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_log = logging.getLogger(__name__)


def compile_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of tensors that XLA compiles if this process has a GPU.

    GPU and XLA are looked up in each call. A call with an unknown shape is not compiled, because
    each number of images would need another program.
    """
    compiled = tf.function(function, autograph=False, jit_compile=True)

    @functools.wraps(function)
    def compiled_or_plain(*values: Any) -> Any:
        tensors = [value for value in tf.nest.flatten(values) if tf.is_tensor(value)]
        has_static_shapes = all(tensor.shape.is_fully_defined() for tensor in tensors)
        if has_static_shapes and has_gpu() and supported():
            return compiled(*values)
        return function(*values)

    return compiled_or_plain


def has_gpu() -> bool:
    """Returns whether TensorFlow may use a GPU in this process."""
    return bool(tf.config.get_visible_devices("GPU"))


def supported() -> bool:
    """Returns whether XLA compiles for the device of this process.

    HYBRID_IMAGENET_XLA=0 turns XLA off. On a GPU, a small program is compiled once. If that fails,
    a warning is logged, and steps run without XLA, with more kernels.
    """
    if os.environ.get("HYBRID_IMAGENET_XLA", "1") == "0":
        return False
    return not has_gpu() or _runs_on_gpu()


@functools.cache
def _runs_on_gpu() -> bool:
    program = tf.function(lambda x: tf.reduce_sum(x * x + 1.0), autograph=False, jit_compile=True)
    try:
        # The caller may be tracing a function; init_scope runs the program at once.
        with tf.init_scope():
            return float(program(tf.ones([1024]))) == 2048.0
    except tf.errors.OpError as error:
        _log.warning(
            "XLA does not compile for this GPU, so steps run without it and are slower (%s)",
            str(error).splitlines()[0],
        )
        return False
