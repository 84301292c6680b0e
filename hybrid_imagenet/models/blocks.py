"""Builds the layers of the networks with the settings they share, each with initial weights of its
own stream.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import keras
import tensorflow as tf

from hybrid_imagenet.models.layers import BlurPool, Conv2D
from hybrid_imagenet.models.normalization import BatchNormalization

_COLOURS = 3
_STDDEV = (
    0.01  # of the classifier: Goyal et al. §5.1; the other papers say nothing about the classifier
)


@dataclasses.dataclass(frozen=True)
class Builder:
    """Adds layers to a functional graph.

    Attributes:
      precision: `float32`, `mixed_float16` or `mixed_bfloat16`. Variables are FP32 in all three.
      initializer: see `convolution_initializer`.
      zero_last_gamma: start the last BN scale of each residual block at 0 (Lu et al. §2.2.3).
      batch_norm: `last`, `moving` or `precise` (see `normalization.BatchNormalization`).
      batch_norm_momentum: decay of the moving average.
      batch_norm_epsilon: added to the variance.
      seed: of the initial weights; each layer draws from its own stream, derived from (seed, layer
      name).
      sync_allreduce: `(tensor, name) -> sum over ranks`; given, training statistics cover the
      batches of all ranks.
      virtual_gpus: equal parts of a training batch, each of which is normalized by itself.
      blurpool: blur before strides (see `layers.BlurPool`); ResNets only.
      initial_bias: score of every class at the start, before the weights of the classifier act.
    """

    precision: str = "float32"
    initializer: str = "kaiming"
    zero_last_gamma: bool = True
    batch_norm: str = "last"
    batch_norm_momentum: float = 0.9
    batch_norm_epsilon: float = 1e-5
    seed: int = 0
    sync_allreduce: Callable[[tf.Tensor, str], tf.Tensor] | None = None
    virtual_gpus: int = 1
    blurpool: bool = False
    initial_bias: float = 0.0

    def images(self, size: int | None) -> keras.KerasTensor:
        """The input: [b, size, size, 3] in the compute type; None leaves the size open."""
        compute = keras.DTypePolicy(self.precision).compute_dtype
        return keras.Input((size, size, 3), dtype=compute, name="image")

    def conv(
        self,
        x: keras.KerasTensor,
        filters: int,
        kernel: int,
        *,
        stride: int = 1,
        pad: int | None = None,
        name: str,
    ) -> keras.KerasTensor:
        """A convolution without bias, padded by half its kernel unless `pad` says otherwise.

        With `blurpool` a stride follows a blur, but for the image itself. A 1x1 convolution leaves
        the stride to it.
        """
        if self.blurpool and stride > 1 and x.shape[-1] > _COLOURS:
            x = BlurPool(stride if kernel == 1 else 1, dtype=self.precision, name=f"{name}_blur")(x)
            stride = 1 if kernel == 1 else stride
        return Conv2D(
            filters,
            kernel,
            strides=stride,
            pad=kernel // 2 if pad is None else pad,
            use_bias=False,
            kernel_initializer=convolution_initializer(self.initializer, self.seed, name),
            dtype=self.precision,
            name=name,
        )(x)

    def norm(self, x: keras.KerasTensor, *, name: str, last: bool = False) -> keras.KerasTensor:
        """Batch normalization; `last` marks the last one of a residual block."""
        gamma = "zeros" if last and self.zero_last_gamma else "ones"
        return BatchNormalization(
            mode=self.batch_norm,
            momentum=self.batch_norm_momentum,
            epsilon=self.batch_norm_epsilon,
            allreduce=self.sync_allreduce,
            virtual_gpus=self.virtual_gpus,
            gamma_initializer=gamma,
            dtype=self.precision,
            name=name,
        )(x)

    def relu(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """max(x, 0)."""
        return keras.layers.ReLU(dtype=self.precision, name=name)(x)

    def conv_norm_relu(
        self,
        x: keras.KerasTensor,
        filters: int,
        kernel: int,
        *,
        stride: int = 1,
        pad: int | None = None,
        name: str,
    ) -> keras.KerasTensor:
        x = self.conv(x, filters, kernel, stride=stride, pad=pad, name=f"{name}_conv")
        return self.relu(self.norm(x, name=f"{name}_bn"), name=f"{name}_relu")

    def logits(self, x: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
        """The classifier on [b, c]: FP32 throughout, so that softmax and loss see full
        precision.
        """
        return keras.layers.Dense(
            num_classes,
            kernel_initializer=keras.initializers.RandomNormal(
                0.0, _STDDEV, seed=layer_seed(self.seed, "logits")
            ),
            bias_initializer=keras.initializers.Constant(self.initial_bias),
            dtype="float32",
            name="logits",
        )(x)


def layer_seed(seed: int, layer: str) -> int:
    """A 31-bit seed that depends on the run's seed and the layer's name only, not on the order of
    construction.
    """
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def convolution_initializer(kind: str, seed: int, layer: str) -> keras.initializers.Initializer:
    """The initializer of a convolution kernel (Lu et al. §2.2.3 and Table 3.5).

    `kaiming` is N(0, 2 / fan_in), not truncated (He et al. 2015); `xavier` is uniform with variance
    2 / (fan_in + fan_out) (Glorot and Bengio 2010); `gaussian` is N(0, 1) as Lu et al. print it.
    """
    stream = layer_seed(seed, layer)
    if kind == "kaiming":
        return keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal", seed=stream)
    if kind == "xavier":
        return keras.initializers.GlorotUniform(seed=stream)
    return keras.initializers.RandomNormal(0.0, 1.0, seed=stream)
