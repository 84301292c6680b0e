"""Convolutions in the form that oneDNN runs fastest on a CPU, and fewer kernels to start on a GPU.

All forms compute the same sums. What each is for was measured on AVX512-BF16 (see
docs/dev/performance-log.md):

* A 1x1 convolution is a matrix product over pixels; a strided one takes every second pixel first.
  The gradient of its kernel runs at 350 GFLOP/s per core as a product and at 250 as a convolution.
* The kernel gradient of a 3x3 convolution is nine products, one for each offset between input and
  output. In BF16 oneDNN's own falls to 150 GFLOP/s and less where maps are small and channels many,
  and with stride 2.
* A convolution with explicit padding has no oneDNN gradient at all (80 times slower in BF16), so
  padding is `SAME` where that means the same, else an operation of its own. cuDNN pads while it
  convolves.
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

_CELL = 16  # numbers in a square of pixels, filled up to what tensor cores take
_FEW_CHANNELS = (
    64  # with fewer, nine products are no faster than oneDNN's kernel gradient at stride 2 either
)
_MANY_CHANNELS = 256  # from here on nine products beat the BF16 kernel gradient at stride 1
_held: contextvars.ContextVar[Mapping[int, tf.Tensor] | None] = contextvars.ContextVar(
    "kernels", default=None
)


def pad_sides(images: tf.Tensor, pad: int) -> tf.Tensor:
    """Adds `pad` pixels of zeros on all four sides of [b, h, w, c]."""
    return tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]]) if pad else images


def conv2d(images: tf.Tensor, kernel: tf.Tensor, stride: int, pad: int) -> tf.Tensor:
    """Convolves [b, h, w, c] with [k, k, c, f] to [b, (h + 2 pad - k) // stride + 1, ..., f].

    The kernel has the type of the images. Height and width must be known when the graph is built
    for other forms than the plain one to be used; the batch need not.
    """
    _, height, width, channels = images.shape
    divides = (
        height is not None and width is not None and height % stride == 0 and width % stride == 0
    )
    size = kernel.shape[0]
    if has_gpu() and divides and (size, stride, pad) == (7, 2, 3) and channels <= _CELL // 4:
        # The result of a compiled function has no static shape, and without one ReLU is not fused
        # with normalization.
        cells = tf.reshape(_cells(images), [-1, height // 2 + 3, width // 2 + 3, _CELL])
        return tf.nn.conv2d(cells, _kernel_of_cells(kernel), 1, "VALID")
    if not has_gpu() and divides and stride <= 2:
        if size == 1 and pad == 0:
            return _conv_1x1(images, kernel, stride)
        few = channels < _FEW_CHANNELS or (
            stride == 1 and (images.dtype == tf.float32 or channels < _MANY_CHANNELS)
        )
        if size == 3 and pad == 1 and not few:
            return _conv_3x3(images, kernel, stride)
    return _plain(images, kernel, stride, pad)


def max_pool(images: tf.Tensor, size: int, stride: int, pad: int) -> tf.Tensor:
    """The maximum over windows of [b, h, w, c] that is not negative, with `pad` pixels of zeros, or
    less, around it.
    """
    # XLA has no pooling that pads.
    if not has_gpu() or private_api.is_compiled_by_xla():
        return tf.nn.max_pool2d(pad_sides(images, pad), size, stride, "VALID")
    return tf.nn.max_pool2d(images, size, stride, _padding(pad))


def _plain(images: tf.Tensor, kernel: tf.Tensor, stride: int, pad: int) -> tf.Tensor:
    if stride == 1 and kernel.shape[0] == 2 * pad + 1:
        return tf.nn.conv2d(images, kernel, 1, "SAME")
    if not has_gpu():
        return tf.nn.conv2d(pad_sides(images, pad), kernel, stride, "VALID")
    return tf.nn.conv2d(images, kernel, stride, _padding(pad))


@compile_on_gpu
def _cells(images: tf.Tensor) -> tf.Tensor:
    """[b, h, w, c] as squares of 2 x 2 pixels, with zeros around them: [b, h / 2 + 3, w / 2 + 3,
    _CELL].

    A convolution of 7 x 7 with stride 2 is one of 4 x 4 squares. cuDNN pads 3 channels to 8, in a
    pass of its own, and its kernels for so few channels are slower.
    """
    _, height, width, channels = images.shape
    cells = tf.reshape(images, [-1, height // 2, 2, width // 2, 2, channels])
    cells = tf.reshape(
        tf.transpose(cells, [0, 1, 3, 2, 4, 5]), [-1, height // 2, width // 2, 4 * channels]
    )
    return tf.pad(cells, [[0, 0], [2, 1], [2, 1], [0, _CELL - 4 * channels]])


def _kernel_of_cells(kernel: tf.Tensor) -> tf.Tensor:
    """The kernel for `_cells` that does what one of [7, 7, c, f] does: [4, 4, _CELL, f]."""
    _, _, channels, filters = kernel.shape
    taps = tf.reshape(
        tf.pad(kernel, [[1, 0], [1, 0], [0, 0], [0, 0]]), [4, 2, 4, 2, channels, filters]
    )
    taps = tf.reshape(tf.transpose(taps, [0, 2, 1, 3, 4, 5]), [4, 4, 4 * channels, filters])
    return tf.pad(taps, [[0, 0], [0, 0], [0, _CELL - 4 * channels], [0, 0]])


def _padding(pad: int) -> str | list[list[int]]:
    """Padding that a GPU's kernels do themselves, without another pass over the images; the same on
    both sides.
    """
    return [[0, 0], [pad, pad], [pad, pad], [0, 0]] if pad else "VALID"


def _conv_1x1(images: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """The product of every `stride`-th pixel with the kernel."""
    _, height, width, channels = images.shape
    filters = kernel.shape[-1]
    rows, columns = height // stride, width // stride
    if stride == 2:
        # A slice of pairs is 5 times faster than one with a step; tf.slice has a faster gradient
        # than indexing, too.
        pairs = tf.reshape(images, [-1, rows, 2, columns, 2, channels])
        images = tf.slice(pairs, [0] * 6, [-1, rows, 1, columns, 1, channels])
    products = tf.matmul(
        tf.reshape(images, [-1, channels]), tf.reshape(kernel, [channels, filters])
    )
    return tf.reshape(products, [-1, rows, columns, filters])


def _conv_3x3(images: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """oneDNN's convolution, with the gradient of the kernel as nine products."""
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
    """Sums x[b, stride i + r, stride j + s, c] dy[b, i, j, f] over b, i and j: [3, 3, c, f].

    Args:
      padded: [b, stride h + 2, stride w + 2, c], the input with one pixel of zeros around it.
      dy: [b, h, w, f].
      stride: 1 or 2.
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


def cast_value(kernel: keras.Variable) -> tf.Tensor:
    """Returns a layer's kernel in its compute type."""
    found = (_held.get() or {}).get(id(kernel))
    return tf.convert_to_tensor(kernel) if found is None else found


@contextlib.contextmanager
def cast_together(
    kernels: Sequence[tuple[keras.Variable, str]],
) -> Iterator[Mapping[int, tf.Tensor]]:
    """Casts kernels in one pass over them: on a GPU each cast of its own is a kernel to start.

    Inside, `cast_value` gives parts of the one vector, which are yielded by the variable's
    identity. A gradient is to be taken for these parts: it does not reach the variables.

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
    parts = tf.split(
        compile_on_gpu(joined)(*(k.value for k in kernels)), [math.prod(k.shape) for k in kernels]
    )
    return {id(k): tf.reshape(part, k.shape) for k, part in zip(kernels, parts, strict=True)}
