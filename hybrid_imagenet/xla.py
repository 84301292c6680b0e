"""Compiles parts of a step by XLA where a GPU runs them: a few kernels in place of many."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_log = logging.getLogger(__name__)


def compile_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of tensors that XLA compiles if this process has a GPU that XLA supports
    when it is called.

    A call with an unknown shape is not compiled: each number of images would be another program.
    """
    compiled = tf.function(function, autograph=False, jit_compile=True)

    @functools.wraps(function)
    def chosen(*values: Any) -> Any:
        known = all(
            value.shape.is_fully_defined()
            for value in tf.nest.flatten(values)
            if tf.is_tensor(value)
        )
        return (compiled if known and has_gpu() and supported() else function)(*values)

    return chosen


def has_gpu() -> bool:
    """Returns whether TensorFlow may use a GPU in this process."""
    return bool(tf.config.get_visible_devices("GPU"))


def supported() -> bool:
    """Returns whether XLA compiles for the device of this process.

    HYBRID_IMAGENET_XLA=0 says no. A GPU is asked once, by a small program; if it cannot run it, a
    warning is logged and steps run on it without XLA, with more kernels.
    """
    return os.environ.get("HYBRID_IMAGENET_XLA", "1") != "0" and (not has_gpu() or _runs_on_gpu())


@functools.cache
def _runs_on_gpu() -> bool:
    program = tf.function(lambda x: tf.reduce_sum(x * x + 1.0), autograph=False, jit_compile=True)
    try:
        with tf.init_scope():
            return float(program(tf.ones([1024]))) == 2048.0
    except tf.errors.OpError as error:
        _log.warning(
            "XLA does not compile for this GPU: steps run without it, slower (%s)",
            str(error).splitlines()[0],
        )
        return False
