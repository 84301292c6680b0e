"""Adds the gradient of a block's shortcut inside the matrix product of its first convolution.

The input of a residual block goes to a 1x1 convolution and to the shortcut, so its gradient is the
sum of two tensors. TensorFlow writes both and adds them in another kernel: 1.9 of the 36.8 ms of a
step of ResNet-50 (FP16, 256 images, H200). As a matrix product that starts from the shortcut's
gradient (beta = 1 of GEMM) the sum needs no pass of its own. On a GPU it has not been timed yet.
XLA adds out of place with cuBLASLt only: XLA_FLAGS=--xla_gpu_enable_cublaslt=true.
"""

from __future__ import annotations

import tensorflow as tf

from hybrid_imagenet import xla


def convolve_and_keep(inputs: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the inputs for the shortcut, and their 1x1 convolution with stride 1.

    The inputs are the first result: where TensorFlow's graph optimizer puts the addition of the
    shortcut into a normalization, it takes the first result of the operation that the shortcut
    comes from, whichever one is meant. All results of a custom gradient come from one operation.

    Args:
      inputs: [b, h, w, c], of static shape.
      kernel: [1, 1, c, f], in the type of the inputs.
    """

    @tf.custom_gradient
    def fork(x: tf.Tensor, k: tf.Tensor) -> tuple:
        outputs = tf.nn.conv2d(x, k, 1, "VALID")

        def gradient(d_shortcut: tf.Tensor, d_outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            dk = tf.raw_ops.Conv2DBackpropFilter(
                input=x,
                filter_sizes=k.shape,
                out_backprop=d_outputs,
                strides=[1, 1, 1, 1],
                padding="VALID",
            )
            dx = _input_gradient_plus(d_shortcut, d_outputs, k)
            # The graph optimizer does not know the shape of a compiled program's result.
            return tf.reshape(dx, x.shape), dk

        return (tf.identity(x), outputs), gradient

    kept, outputs = fork(inputs, kernel)
    return kept, outputs


@xla.compile_on_gpu
def _input_gradient_plus(
    d_shortcut: tf.Tensor, d_outputs: tf.Tensor, kernel: tf.Tensor
) -> tf.Tensor:
    """Returns the gradient of the inputs of a 1x1 convolution plus that of the shortcut."""
    _, _, channels, filters = kernel.shape
    rows = tf.reshape(d_outputs, [-1, filters])
    product = tf.matmul(rows, tf.reshape(kernel, [channels, filters]), transpose_b=True)
    return tf.reshape(product + tf.reshape(d_shortcut, [-1, channels]), d_shortcut.shape)
