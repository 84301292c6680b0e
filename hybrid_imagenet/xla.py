"""Compiles parts of a training step with XLA on a GPU, to launch fewer kernels."""

from __future__ import annotations

import functools
import logging
import math
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
    return not has_gpu() or _compiles_functions_on_gpu()


def supports_step() -> bool:
    """Returns whether XLA also compiles what forward and backward pass consist of.

    On a GPU a small convolution and a matrix product in FP16 are compiled once, for which XLA tries
    several kernels. If that fails, a warning is logged.
    """
    return supported() and (not has_gpu() or _compiles_convolutions_on_gpu())


@functools.cache
def _compiles_functions_on_gpu() -> bool:
    def exponentials(x: tf.Tensor) -> tf.Tensor:
        # XLA takes these from CUDA's libdevice, which an installation may lack. Each is 1 at x = 1.
        return tf.reduce_mean(tf.exp(x - 1.0) * tf.pow(x, x) * tf.math.rsqrt(x))

    return _computes_one(exponentials, tf.TensorSpec([1024]), "XLA does not compile for this GPU")


@functools.cache
def _compiles_convolutions_on_gpu() -> bool:
    def network(images: tf.Tensor) -> tf.Tensor:
        # Each sum of 72 or 8 products is 1.
        kernel = tf.fill([3, 3, 8, 8], tf.constant(1 / 72, images.dtype)) * images[0, 0, 0, 0]
        matrix = tf.fill([8, 8], tf.constant(1 / 8, images.dtype)) * images[0, 0, 0, 0]
        pixels = tf.reshape(tf.nn.conv2d(images, kernel, 1, "VALID"), [-1, 8])
        mean = tf.reduce_mean(tf.cast(tf.matmul(pixels, matrix), tf.float32))
        # Not a tape, which would record nothing inside init_scope.
        (gradient,) = tf.gradients(mean, kernel)
        # The mean is linear in the kernel.
        return tf.reduce_sum(tf.cast(gradient, tf.float32) * tf.cast(kernel, tf.float32))

    images = tf.TensorSpec([8, 18, 18, 8], tf.float16)
    return _computes_one(network, images, "XLA does not compile convolutions for this GPU")


def _computes_one(
    function: Callable[..., tf.Tensor], argument: tf.TensorSpec, problem: str
) -> bool:
    """Returns whether a function that XLA compiles returns about 1 for ones; logs it if not."""
    program = tf.function(function, autograph=False, jit_compile=True)
    try:
        # The caller may be tracing a function; init_scope runs the program at once.
        with tf.init_scope():
            value = float(program(tf.ones(argument.shape, argument.dtype)))
        reason = f"a test program returned {value:g} instead of 1"
    except tf.errors.OpError as error:
        value = math.nan
        reason = str(error).splitlines()[0]
    # FP16 rounds 1/72.
    if abs(value - 1.0) < 0.01:
        return True
    _log.warning("%s, so steps run without it and are slower (%s)", problem, reason)
    return False
