"""Builds the layers of the networks with their common settings."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import keras
import tensorflow as tf

from hybrid_imagenet.models.fused_layers import StemNormalization
from hybrid_imagenet.models.layers import BlurPool, Conv2D
from hybrid_imagenet.models.normalization import BatchNormalization

BATCH_NORM_EPSILON = 1e-5
"""Added to the variance, as in the published trainings and in torchvision."""

_IMAGE_CHANNELS = 3
# Goyal et al. §5.1. The other papers say nothing about the classifier.
_CLASSIFIER_STDDEV = 0.01


@dataclasses.dataclass(frozen=True)
class Builder:
    """Adds layers to a functional graph.

    Attributes:
      precision: `float32`, `mixed_float16` or `mixed_bfloat16`. Variables are FP32 in all three.
      initializer: See `convolution_initializer`.
      zero_last_gamma: Whether the last normalization scale of each residual block starts at 0 (Lu
        et al. §2.2.3) instead of 1.
      batch_norm: `last`, `moving` or `precise` (see `normalization.BatchNormalization`).
      batch_norm_epsilon: Added to the variance.
      seed: Seed of the initial weights. Each layer draws from its own stream (see `layer_seed`).
      sync_allreduce: `(tensor, name) -> sum over ranks`. If set, training normalizes over the
        batches of these ranks.
      virtual_gpus: Equal parts of a training batch, each of which is normalized by itself.
      blurpool: Whether to blur before strides (see `layers.BlurPool`); only for ResNets.
      initial_bias: Initial score of every class, before the classifier's weights act.
      jit_stem: Whether normalization, ReLU and max pooling of a ResNet's stem are one layer, which
        is one XLA program on a GPU (see `models.stem_program`).
    """

    precision: str = "float32"
    initializer: str = "kaiming"
    zero_last_gamma: bool = True
    batch_norm: str = "last"
    batch_norm_epsilon: float = BATCH_NORM_EPSILON
    seed: int = 0
    sync_allreduce: Callable[[tf.Tensor, str], tf.Tensor] | None = None
    virtual_gpus: int = 1
    blurpool: bool = False
    initial_bias: float = 0.0
    jit_stem: bool = False

    def images(self, size: int | None) -> keras.KerasTensor:
        """Returns the input, [b, size, size, 3] in the compute type; None accepts any size."""
        compute_dtype = keras.DTypePolicy(self.precision).compute_dtype
        return keras.Input((size, size, _IMAGE_CHANNELS), dtype=compute_dtype, name="image")

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
        """Adds a convolution without bias.

        With `blurpool`, a blur precedes every stride except that on the image itself. A strided 1x1
        convolution leaves the stride to the blur.

        Args:
          x: [b, h, w, c].
          filters: Output channels.
          kernel: Side of the kernel in pixels.
          stride: Pixels.
          pad: Pixels of zeros on each side; None for half the kernel.
          name: Name of the layer.
        """
        if self.blurpool and stride > 1 and x.shape[-1] > _IMAGE_CHANNELS:
            blur_stride = 1
            if kernel == 1:
                blur_stride = stride
                stride = 1
            x = BlurPool(blur_stride, dtype=self.precision, name=f"{name}_blur")(x)
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

    @property
    def fuses_stem(self) -> bool:
        """Whether a ResNet's stem ends in one layer that normalizes, applies ReLU and pools.

        The program normalizes the batch of one rank, not of several ranks or of virtual GPUs. With
        `blurpool` the pooling is another one.
        """
        is_local = self.sync_allreduce is None and self.virtual_gpus == 1
        return self.jit_stem and is_local and not self.blurpool

    def norm(
        self,
        x: keras.KerasTensor,
        *,
        name: str,
        last: bool = False,
        layer: type[BatchNormalization] = BatchNormalization,
    ) -> keras.KerasTensor:
        """Adds batch normalization.

        Args:
          x: [b, h, w, c].
          name: Name of the layer.
          last: Whether it is the last one of a residual block.
          layer: Class of the layer; that of `fused_layers` does more than to normalize.
        """
        gamma = "zeros" if last and self.zero_last_gamma else "ones"
        return layer(
            mode=self.batch_norm,
            epsilon=self.batch_norm_epsilon,
            allreduce=self.sync_allreduce,
            virtual_gpus=self.virtual_gpus,
            gamma_initializer=gamma,
            dtype=self.precision,
            name=name,
        )(x)

    def norm_relu_pool(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Adds normalization, ReLU and max pooling of 3 x 3 pixels with stride 2 as one layer."""
        return self.norm(x, name=name, layer=StemNormalization)

    def norm_relu(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Adds `norm` and `relu`; `name` is the beginning of their names."""
        return self.relu(self.norm(x, name=f"{name}_bn"), name=f"{name}_relu")

    def join(
        self, x: keras.KerasTensor, shortcut: keras.KerasTensor, *, name: str, norm_name: str
    ) -> keras.KerasTensor:
        """Adds a block's last normalization, the residual sum and its ReLU."""
        x = self.norm(x, name=norm_name, last=True)
        x = keras.layers.Add(dtype=self.precision, name=f"{name}_add")([x, shortcut])
        return self.relu(x, name=f"{name}_relu")

    def relu(self, x: keras.KerasTensor, *, name: str) -> keras.KerasTensor:
        """Adds max(x, 0)."""
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
        """Adds `conv`, `norm` and `relu`."""
        x = self.conv(x, filters, kernel, stride=stride, pad=pad, name=f"{name}_conv")
        return self.norm_relu(x, name=name)

    def logits(self, x: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
        """Adds the classifier on [b, c].

        It is FP32 in every precision, so that softmax and loss do not lose accuracy.
        """
        return keras.layers.Dense(
            num_classes,
            kernel_initializer=keras.initializers.RandomNormal(
                0.0, _CLASSIFIER_STDDEV, seed=layer_seed(self.seed, "logits")
            ),
            bias_initializer=keras.initializers.Constant(self.initial_bias),
            dtype="float32",
            name="logits",
        )(x)


def layer_seed(seed: int, layer: str) -> int:
    """Returns a 31-bit seed that depends only on the run's seed and the layer's name.

    So the weights of a layer do not change if another layer is added before it.
    """
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def convolution_initializer(kind: str, seed: int, layer: str) -> keras.initializers.Initializer:
    """Returns the initializer of a convolution kernel (Lu et al. §2.2.3 and Table 3.5).

    Args:
      kind: `kaiming` for N(0, 2 / fan_in), not truncated (He et al. 2015); `xavier` for a uniform
        distribution with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010); `gaussian` for
        N(0, 1), as Lu et al. print it.
      seed: Seed of the run.
      layer: Name of the layer.
    """
    stream = layer_seed(seed, layer)
    if kind == "kaiming":
        return keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal", seed=stream)
    if kind == "xavier":
        return keras.initializers.GlorotUniform(seed=stream)
    return keras.initializers.RandomNormal(0.0, 1.0, seed=stream)
