"""Convolution and pooling in the forms that run fastest on a CPU and on a GPU.

All forms compute the same sums. They were measured on AVX512-BF16 (docs/dev/measurements.md):

* A 1x1 convolution is a matrix product over pixels; a strided one takes every second pixel first.
  The gradient of its kernel runs at 350 GFLOP/s per core as a product, and at 250 as a convolution.
* The kernel gradient of a 3x3 convolution is nine products, one for each offset between input and
  output. In BF16 oneDNN's own gradient drops to 150 GFLOP/s and less for small maps with many
  channels, and with stride 2.
* A convolution with explicit padding has no oneDNN gradient at all (80 times slower in BF16).
  Padding is therefore `SAME` if that means the same, and a separate operation otherwise. On a GPU,
  cuDNN pads within the convolution.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.xla import compile_on_gpu, has_gpu

# Channels of a 2 x 2 block of pixels, padded to the number that tensor cores take.
_BLOCK_CHANNELS = 16
# With fewer channels, nine products are not faster than oneDNN's kernel gradient, even at stride 2.
_MIN_CHANNELS_STRIDE_2 = 64
# From here on nine products beat oneDNN's BF16 kernel gradient at stride 1.
_MIN_CHANNELS_STRIDE_1 = 256
_fused_casts: contextvars.ContextVar[Mapping[int, tf.Tensor] | None] = contextvars.ContextVar(
    "fused_kernel_casts", default=None
)


def conv2d(images: tf.Tensor, kernel: tf.Tensor, stride: int, pad: int) -> tf.Tensor:
    """Convolves images with a square kernel.

    The faster forms need height and width when the graph is built, but not the batch size.

    Args:
      images: [b, h, w, c].
      kernel: [k, k, c, f], in the type of the images.
      stride: Pixels, the same for height and width.
      pad: Pixels of zeros on each of the four sides.

    Returns:
      [b, (h + 2 pad - k) // stride + 1, (w + 2 pad - k) // stride + 1, f].
    """
    _, height, width, channels = images.shape
    size = kernel.shape[0]
    stride_divides = (
        height is not None and width is not None and height % stride == 0 and width % stride == 0
    )
    if not stride_divides:
        return _conv_plain(images, kernel, stride, pad)
    if has_gpu():
        is_stem = (size, stride, pad) == (7, 2, 3) and channels <= _BLOCK_CHANNELS // 4
        if is_stem:
            # The result of a compiled function has no static shape, and without one TensorFlow does
            # not fuse ReLU with the normalization.
            shape = [-1, height // 2 + 3, width // 2 + 3, _BLOCK_CHANNELS]
            blocks = tf.reshape(_pixel_blocks(images), shape)
            return tf.nn.conv2d(blocks, _kernel_for_pixel_blocks(kernel), 1, "VALID")
        return _conv_plain(images, kernel, stride, pad)
    if size == 1 and pad == 0 and stride <= 2:
        return _conv_1x1(images, kernel, stride)
    if size == 3 and pad == 1 and _products_are_faster(stride, channels, images.dtype):
        return _conv_3x3(images, kernel, stride)
    return _conv_plain(images, kernel, stride, pad)


def _products_are_faster(stride: int, channels: int, dtype: tf.DType) -> bool:
    """Returns whether a CPU computes a 3x3 kernel gradient faster as nine products."""
    if stride == 1:
        return bool(dtype != tf.float32 and channels >= _MIN_CHANNELS_STRIDE_1)
    return stride == 2 and channels >= _MIN_CHANNELS_STRIDE_2


def max_pool(images: tf.Tensor, size: int, stride: int, pad: int) -> tf.Tensor:
    """Takes the maximum over windows of non-negative values.

    The border may be padded by zeros or by minus infinity, because both give the same maxima.

    Args:
      images: [b, h, w, c], not negative.
      size: Side of the window in pixels.
      stride: Pixels, the same for height and width.
      pad: Pixels on each of the four sides.
    """
    # XLA cannot compile pooling with explicit padding.
    if not has_gpu() or private_api.is_compiled_by_xla():
        return tf.nn.max_pool2d(pad_sides(images, pad), size, stride, "VALID")
    return tf.nn.max_pool2d(images, size, stride, _explicit_padding(pad))


def pad_sides(images: tf.Tensor, pad: int) -> tf.Tensor:
    """Adds `pad` pixels of zeros on all four sides of [b, h, w, c]."""
    if pad == 0:
        return images
    return tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])


def _explicit_padding(pad: int) -> str | list[list[int]]:
    """Returns padding that a GPU's kernels apply without another pass over the images."""
    return [[0, 0], [pad, pad], [pad, pad], [0, 0]] if pad else "VALID"


def _conv_plain(images: tf.Tensor, kernel: tf.Tensor, stride: int, pad: int) -> tf.Tensor:
    """Convolves by TensorFlow's operation."""
    if stride == 1 and kernel.shape[0] == 2 * pad + 1:
        return tf.nn.conv2d(images, kernel, 1, "SAME")
    if not has_gpu():
        return tf.nn.conv2d(pad_sides(images, pad), kernel, stride, "VALID")
    return tf.nn.conv2d(images, kernel, stride, _explicit_padding(pad))


@compile_on_gpu
def _pixel_blocks(images: tf.Tensor) -> tf.Tensor:
    """Returns the images as blocks of 2 x 2 pixels, padded by zeros on all sides.

    A convolution of 7 x 7 pixels with stride 2 is one of 4 x 4 blocks with stride 1. It is used
    because cuDNN pads 3 channels to 8, in a separate pass, and its kernels for so few channels are
    slower.

    Args:
      images: [b, h, w, c], with even h and w.

    Returns:
      [b, h / 2 + 3, w / 2 + 3, _BLOCK_CHANNELS].
    """
    _, height, width, channels = images.shape
    blocks = tf.reshape(images, [-1, height // 2, 2, width // 2, 2, channels])
    blocks = tf.reshape(
        tf.transpose(blocks, [0, 1, 3, 2, 4, 5]), [-1, height // 2, width // 2, 4 * channels]
    )
    return tf.pad(blocks, [[0, 0], [2, 1], [2, 1], [0, _BLOCK_CHANNELS - 4 * channels]])


def _kernel_for_pixel_blocks(kernel: tf.Tensor) -> tf.Tensor:
    """Returns the kernel that does on `_pixel_blocks` what `kernel` does on pixels.

    Args:
      kernel: [7, 7, c, f].

    Returns:
      [4, 4, _BLOCK_CHANNELS, f].
    """
    _, _, channels, filters = kernel.shape
    # A row and a column of zeros make the kernel 8 x 8, which is 4 x 4 blocks.
    taps = tf.reshape(
        tf.pad(kernel, [[1, 0], [1, 0], [0, 0], [0, 0]]), [4, 2, 4, 2, channels, filters]
    )
    taps = tf.reshape(tf.transpose(taps, [0, 2, 1, 3, 4, 5]), [4, 4, 4 * channels, filters])
    return tf.pad(taps, [[0, 0], [0, 0], [0, _BLOCK_CHANNELS - 4 * channels], [0, 0]])


def _conv_1x1(images: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """Returns the product of every `stride`-th pixel with the kernel."""
    _, height, width, channels = images.shape
    filters = kernel.shape[-1]
    rows = height // stride
    columns = width // stride
    if stride == 2:
        # A slice of pairs is 5 times faster than a strided slice, and tf.slice has a faster
        # gradient than indexing.
        pairs = tf.reshape(images, [-1, rows, 2, columns, 2, channels])
        images = tf.slice(pairs, [0] * 6, [-1, rows, 1, columns, 1, channels])
    products = tf.matmul(
        tf.reshape(images, [-1, channels]), tf.reshape(kernel, [channels, filters])
    )
    return tf.reshape(products, [-1, rows, columns, filters])


def _conv_3x3(images: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """Convolves by oneDNN and computes the gradient of the kernel as nine products."""
    shape = images.shape

    @tf.custom_gradient
    def convolve(x: tf.Tensor, k: tf.Tensor) -> tuple:
        padded = pad_sides(x, 1) if stride == 2 else x
        padding = "VALID" if stride == 2 else "SAME"
        strides = [1, stride, stride, 1]

        def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            dx = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(padded),
                filter=k,
                out_backprop=dy,
                strides=strides,
                padding=padding,
            )
            if stride == 2:
                dx = tf.slice(dx, [0, 1, 1, 0], [-1, *shape[1:]])
            return dx, _kernel_gradient_3x3(padded if stride == 2 else pad_sides(x, 1), dy, stride)

        return tf.raw_ops.Conv2D(input=padded, filter=k, strides=strides, padding=padding), gradient

    return convolve(images, kernel)


def _kernel_gradient_3x3(padded: tf.Tensor, dy: tf.Tensor, stride: int) -> tf.Tensor:
    """Computes the gradient of a 3x3 kernel as nine matrix products.

    It is the sum of x[b, stride i + r, stride j + s, c] dy[b, i, j, f] over b, i and j.

    Args:
      padded: Input x, [b, stride h + 2, stride w + 2, c], the input with one pixel of zeros around
        it.
      dy: [b, h, w, f].
      stride: 1 or 2.

    Returns:
      [3, 3, c, f].
    """
    _, rows, columns, filters = dy.shape
    _, height, width, channels = padded.shape
    outputs = tf.reshape(dy, [-1, filters])
    cells = tf.reshape(padded, [-1, height // stride, stride, width // stride, stride, channels])
    products = []
    for r in range(3):
        for s in range(3):
            begin = [0, r // stride, r % stride, s // stride, s % stride, 0]
            inputs = tf.slice(cells, begin, [-1, rows, 1, columns, 1, channels])
            products.append(
                tf.matmul(tf.reshape(inputs, [-1, channels]), outputs, transpose_a=True)
            )
    return tf.reshape(tf.stack(products), [3, 3, channels, filters])


@contextlib.contextmanager
def fused_kernel_casts(
    kernels: Sequence[tuple[keras.Variable, str]],
) -> Iterator[Mapping[int, tf.Tensor]]:
    """Casts all kernels of convolutions at once, because a GPU launches one kernel per cast.

    Inside the block, `cast_value` returns slices of one cast vector. Gradients must be taken with
    respect to these slices: they do not reach the variables.

    Args:
      kernels: Variables with the compute type of their layers; may be empty.

    Yields:
      The slices, by the identity (`id`) of the variable.
    """
    casts: dict[int, tf.Tensor] = {}
    for dtype in sorted({dtype for _, dtype in kernels}):
        of_type = [kernel for kernel, kernel_dtype in kernels if kernel_dtype == dtype]
        casts |= _cast_at_once(of_type, dtype)
    token = _fused_casts.set(casts)
    try:
        yield casts
    finally:
        _fused_casts.reset(token)


def cast_value(kernel: keras.Variable) -> tf.Tensor:
    """Returns a layer's kernel in its compute type; see `fused_kernel_casts`."""
    casts = _fused_casts.get()
    if casts is not None and id(kernel) in casts:
        return casts[id(kernel)]
    return tf.convert_to_tensor(kernel)


def _cast_at_once(kernels: Sequence[keras.Variable], dtype: str) -> dict[int, tf.Tensor]:
    def concatenate_and_cast(*values: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.concat([tf.reshape(value, [-1]) for value in values], 0), dtype)

    vector = compile_on_gpu(concatenate_and_cast)(*[kernel.value for kernel in kernels])
    # Slices that begin and end at multiples of 64 bytes are views, not copies.
    slices = tf.split(vector, [math.prod(kernel.shape) for kernel in kernels])
    casts = {}
    for kernel, values in zip(kernels, slices, strict=True):
        casts[id(kernel)] = tf.reshape(values, kernel.shape)
    return casts
