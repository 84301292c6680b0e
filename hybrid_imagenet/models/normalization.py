"""Batch normalization on TensorFlow's fused kernel, with FP32 statistics and the papers' ways of
keeping them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api, xla
from hybrid_imagenet.models import moments

_waiting: contextvars.ContextVar[list[_Batch] | None] = contextvars.ContextVar(
    "statistics_waiting", default=None
)


@contextlib.contextmanager
def statistics_together() -> Iterator[None]:
    """Inside, training passes keep nothing; at the end the statistics of all layers are kept at
    once.

    On a GPU that is one compiled program, in place of a kernel or more to start for each layer.
    """
    waiting: list[_Batch] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    kinds = {(batch.layer.mode, batch.layer.momentum) for batch in waiting}
    for kind in sorted(kinds):
        _keep([batch for batch in waiting if (batch.layer.mode, batch.layer.momentum) == kind])


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class BatchNormalization(keras.layers.BatchNormalization):
    """Normalizes each channel of [b, h, w, c]; input and output in the compute type, all statistics
    in FP32.

    In training the batch's own mean and biased variance are used. `mode` says what is kept for
    inference: `last` the statistics of this very batch (Lu et al. §2.2.3-1: no moving average),
    `moving` their moving average `momentum * old + (1 - momentum) * batch`. `precise` keeps what
    `last` keeps; the difference is that the caller runs further batches through frozen weights and
    merges the statistics of all.

    With `trainable` off, training uses and leaves alone the kept statistics.

    With `allreduce`, `(tensor, name) -> sum over ranks`, mean and mean of squares cover the batches
    of these ranks, all of them (Mikami et al.) or a group, and gradients pass through these sums.
    The function is not part of the layer's configuration: a reloaded layer normalizes alone.

    With `parts` above 1 a batch in training is that of `parts` GPUs (`--virtual_gpus`), one after
    the other: each part is normalized by itself and has a moving average of its own. The kept
    statistics are then those of all parts, merged as over ranks; how far each part's moving average
    lies from them is in `apart`, FP32 [2, parts, c], until they are merged (`merge_parts`). Like
    `allreduce` it is not part of the configuration.
    """

    def __init__(
        self,
        mode: str = "last",
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        allreduce: Callable[[tf.Tensor, str], tf.Tensor] | None = None,
        parts: int = 1,
        **kwargs: Any,
    ) -> None:
        """As keras.layers.BatchNormalization over the last axis."""
        super().__init__(momentum=momentum, epsilon=epsilon, **kwargs)
        self.mode = mode
        self.allreduce = allreduce
        self.parts = parts
        self.apart: tf.Variable | None = None

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        if self.mode == "moving" and self.parts > 1:
            with tf.init_scope():
                self.apart = tf.Variable(
                    tf.zeros([2, self.parts, input_shape[-1]]), trainable=False
                )

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        """Normalizes [b, h, w, c]; in training also updates the kept statistics."""
        if not training or not self.trainable:
            return self._kernel(inputs, self.moving_mean, self.moving_variance, training=False)[0]
        if self.parts > 1:
            scale, offset = self.gamma.value, self.beta.value
            outputs, means, variances = normalize_parts(
                inputs, scale, offset, self.epsilon, self.parts
            )
            self._keep_parts(means, variances)
            return outputs
        if self.allreduce is None:
            outputs, batch = self._normalized(inputs)
        else:
            outputs, mean, variance = normalize_over_ranks(
                inputs, self.gamma.value, self.beta.value, self.epsilon, self.allreduce, self.path
            )
            batch = _Batch(self, mean, variance)
        waiting = _waiting.get()
        if waiting is not None:
            waiting.append(batch)
        else:
            _keep([batch])
        return outputs

    def _keep_parts(self, means: tf.Tensor, variances: tf.Tensor) -> None:
        """Updates the kept statistics by those of the parts of a batch, FP32 [parts, c] each."""
        if self.apart is not None:
            old_means = self.moving_mean + self.apart[0]
            old_variances = self.moving_variance + self.apart[1]
            means = self.momentum * old_means + (1.0 - self.momentum) * means
            variances = self.momentum * old_variances + (1.0 - self.momentum) * variances
        mean, variance = merged(means, variances)
        self.moving_mean.assign(mean)
        self.moving_variance.assign(variance)
        if self.apart is not None:
            self.apart.assign(tf.stack([means - mean, variances - variance]))

    def _normalized(self, inputs: tf.Tensor) -> tuple[tf.Tensor, _Batch]:
        """Normalizes by the batch's statistics; returns outputs and statistics.

        The kernel's own variance output has Bessel's correction n / (n - 1), which merging over
        ranks must not see.
        """
        outputs, mean, corrected = self._kernel(inputs, tf.zeros([0]), tf.zeros([0]), training=True)
        if inputs.shape.is_fully_defined():
            count = np.float32(math.prod(inputs.shape[:3]))
        else:
            shape = tf.shape(inputs)
            count = tf.cast(shape[0] * shape[1] * shape[2], tf.float32)
        return outputs, _Batch(self, mean, corrected, (count - 1) / count)

    def _kernel(
        self, inputs: tf.Tensor, mean: Any, variance: Any, *, training: bool
    ) -> tuple[tf.Tensor, ...]:
        result = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=self.gamma.value,
            offset=self.beta.value,
            mean=tf.convert_to_tensor(mean),
            variance=tf.convert_to_tensor(variance),
            epsilon=self.epsilon,
            exponential_avg_factor=1.0,
            data_format="NHWC",
            is_training=training,
        )
        return result.y, result.batch_mean, result.batch_variance

    def get_config(self) -> dict[str, Any]:
        """The arguments that rebuild the layer, without `allreduce` and `parts`."""
        return super().get_config() | {"mode": self.mode}


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The statistics of a layer's batch, FP32 [c]: the biased variance is `variance` times `share`,
    a scalar.
    """

    layer: BatchNormalization
    mean: tf.Tensor
    variance: tf.Tensor
    share: Any = None


def _keep(batches: Sequence[_Batch]) -> None:
    """Updates the kept statistics of layers, of one mode and momentum, by those of their
    batches.
    """
    layers = [batch.layer for batch in batches]
    mode, momentum = layers[0].mode, layers[0].momentum

    def kept(*values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parts = (values[i : i + len(layers)] for i in range(0, len(values), len(layers)))
        means, variances, *old = (list(part) for part in parts)
        shares = [batch.share for batch in batches]
        variances = [v if s is None else v * s for v, s in zip(variances, shares, strict=True)]
        new = [_joined(means), _joined(variances)]
        if mode == "moving":
            new = [
                momentum * _joined(a) + (1.0 - momentum) * b for a, b in zip(old, new, strict=True)
            ]
        return new[0], new[1]

    pairs = [(layer.moving_mean, layer.moving_variance) for layer in layers]
    old = [variable.value for column in zip(*pairs, strict=True) for variable in column]
    found = [batch.mean for batch in batches] + [batch.variance for batch in batches]
    run = xla.compile_on_gpu(kept) if len(layers) > 1 else kept
    for column, joined in zip(zip(*pairs, strict=True), run(*found, *old), strict=True):
        sizes = [variable.shape[0] for variable in column]
        for variable, value in zip(
            column, tf.split(joined, sizes) if len(sizes) > 1 else [joined], strict=True
        ):
            variable.assign(value)


def _joined(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]


def merged(means: tf.Tensor, variances: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and biased variance, [c], of equal parts, [parts, c]."""
    mean, square = (
        tf.reduce_mean(means, 0),
        tf.reduce_mean(moments.second_moment(means, variances, tf), 0),
    )
    return mean, moments.biased_variance(mean, square, tf)


def merge_parts(model: keras.Model) -> None:
    """Gives all parts of each layer's batch the kept statistics, from which their moving averages
    continue.
    """
    for layer in layers_of(model):
        if layer.apart is not None:
            layer.apart.assign(tf.zeros_like(layer.apart))


def layers_of(model: keras.Model) -> list[BatchNormalization]:
    """The batch normalization layers of a model, nested ones included, in the order of
    construction.
    """
    return [layer for layer in _of_keras(model) if isinstance(layer, BatchNormalization)]


def statistics(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """The (mean, biased variance) variables that inference uses, each FP32 [c], one pair per
    layer.
    """
    return [(layer.moving_mean, layer.moving_variance) for layer in layers_of(model)]


def kept_statistics(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """As `statistics`, of any model: the layers of Keras's own class that training changes, the
    frozen left out.
    """
    return [(x.moving_mean, x.moving_variance) for x in _of_keras(model) if x.trainable]


@contextlib.contextmanager
def statistics_of_one_batch(model: keras.Model) -> Iterator[None]:
    """A training pass that is traced inside keeps its batch's statistics, where else their moving
    average is kept.
    """
    momenta = {layer: layer.momentum for layer in _of_keras(model)}
    try:
        for layer in momenta:
            layer.momentum = 0.0
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum


def _of_keras(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    return [
        x
        for x in private_api.flatten_layers(model, include_self=False)
        if isinstance(x, keras.layers.BatchNormalization)
    ]


_AXES = [0, 1, 2]


def normalize_over_ranks(
    inputs: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    epsilon: float,
    allreduce: Callable[[tf.Tensor, str], tf.Tensor],
    name: str,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes [b, h, w, c] by mean and variance over the ranks of a group; their sizes may
    differ.

    Forward, FP32 sums and sums of squares are summed over ranks in one reduction (Mikami et al.),
    with the number of values behind them. The gradient is that of the sum of all ranks' losses, for
    which dy and dy * xhat are summed in one more reduction.

    Each rank takes its variance from the differences to its mean. Over ranks it is E[x^2] - E[x]^2
    in FP32, so that one reduction suffices: its relative error is some 1e-7 (1 + mean^2 /
    variance), 1e-4 where the mean is 30 standard deviations. `normalize_parts` has no such error.

    Args:
      inputs: activations in any float type.
      scale: FP32 [c].
      offset: FP32 [c].
      epsilon: added to the variance.
      allreduce: `(tensor, name) -> sum over ranks`, those of the group.
      name: unique per layer, the same on all ranks.

    Returns:
      Outputs in the type of the inputs, mean and biased variance (FP32 [c], clamped at 0).
    """

    def mean_over_ranks(means: list[tf.Tensor], count: tf.Tensor, label: str) -> list[tf.Tensor]:
        weighted = [mean * count for mean in means]
        total = allreduce(tf.concat([*weighted, [count]], axis=0), f"{name}/{label}")
        return tf.split(total[:-1] / total[-1], len(means))

    @tf.custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        count = tf.cast(tf.size(x) / tf.shape(x)[-1], tf.float32)
        mean, square = mean_over_ranks(list(_moments(x)), count, "moments")
        variance = moments.biased_variance(mean, square, tf)
        inverse = tf.math.rsqrt(variance + epsilon)
        outputs = _outputs(x, mean, inverse, gamma, beta)

        def gradient(d_outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            d_beta, d_gamma = _sums(d_outputs, x, mean, inverse)
            means = mean_over_ranks([d_beta / count, d_gamma / count], count, "gradient_moments")
            return _input_gradient(d_outputs, x, mean, inverse, gamma, *means), d_gamma, d_beta

        return (outputs, mean, variance), gradient

    return normalize(inputs, scale, offset)


@xla.compile_on_gpu
def _moments(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and second moment of this rank's values, FP32 [c]."""
    wide = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(wide, _AXES)
    return mean, moments.second_moment(mean, tf.reduce_mean(tf.square(wide - mean), _AXES), tf)


@xla.compile_on_gpu
def _outputs(
    x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor
) -> tf.Tensor:
    """The normalized values, scaled and shifted, in the type of x."""
    return tf.cast((tf.cast(x, tf.float32) - mean) * (inverse * gamma) + beta, x.dtype)


@xla.compile_on_gpu
def _sums(
    d_outputs: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """This rank's sums of dy and of dy * xhat, FP32 [c]."""
    dy, normal = _wide(d_outputs, x, mean, inverse)
    return tf.reduce_sum(dy, _AXES), tf.reduce_sum(dy * normal, _AXES)


@xla.compile_on_gpu
def _input_gradient(
    d_outputs: tf.Tensor,
    x: tf.Tensor,
    mean: tf.Tensor,
    inverse: tf.Tensor,
    gamma: tf.Tensor,
    dy_mean: tf.Tensor,
    product_mean: tf.Tensor,
) -> tf.Tensor:
    """The gradient of x, from the means over ranks of dy and of dy * xhat, in the type of x."""
    dy, normal = _wide(d_outputs, x, mean, inverse)
    return tf.cast((inverse * gamma) * (dy - dy_mean - normal * product_mean), x.dtype)


def _wide(
    d_outputs: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """dy and xhat in FP32."""
    return tf.cast(d_outputs, tf.float32), (tf.cast(x, tf.float32) - mean) * inverse


def normalize_parts(
    inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, parts: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes [parts * b, h, w, c] part by part; the parts are contiguous.

    Mean and variance are FP32, the variance from the differences to the mean. Forward and backward
    pass are compiled by XLA, which makes each a few loops over memory whatever the number of parts.

    Tensors and `epsilon` are those of `normalize_over_ranks`, but for means and variances, FP32
    [parts, c].
    """
    shape = tf.shape(inputs)
    channels = inputs.shape[-1]

    @tf.custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        flat = tf.reshape(x, [parts, -1, channels])
        outputs, mean, variance = _forward(flat, gamma, beta, epsilon)

        def gradient(d_outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            dy = tf.reshape(d_outputs, [parts, -1, channels])
            dx, d_gamma, d_beta = _backward(flat, dy, gamma, mean, variance, epsilon)
            return tf.reshape(dx, shape), d_gamma, d_beta

        return (tf.reshape(outputs, shape), mean[:, 0], variance[:, 0]), gradient

    return normalize(inputs, scale, offset)


@tf.function(jit_compile=True, autograph=False)
def _forward(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Outputs [parts, n, c], means and variances [parts, 1, c]."""
    wide = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(wide, 1, keepdims=True)
    variance = tf.reduce_mean(tf.square(wide - mean), 1, keepdims=True)
    outputs = (wide - mean) * (tf.math.rsqrt(variance + epsilon) * gamma) + beta
    return tf.cast(outputs, x.dtype), mean, variance


@tf.function(jit_compile=True, autograph=False)
def _backward(
    x: tf.Tensor,
    dy: tf.Tensor,
    gamma: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of the input [parts, n, c] and, summed over parts, of scale and offset [c]."""
    wide = tf.cast(dy, tf.float32)
    inverse = tf.math.rsqrt(variance + epsilon)
    normal = (tf.cast(x, tf.float32) - mean) * inverse
    dy_mean = tf.reduce_mean(wide, 1, keepdims=True)
    product_mean = tf.reduce_mean(wide * normal, 1, keepdims=True)
    dx = (inverse * gamma) * (wide - dy_mean - normal * product_mean)
    count = tf.cast(tf.shape(x)[1], tf.float32)
    d_gamma = tf.reduce_sum(product_mean, [0, 1]) * count
    return tf.cast(dx, x.dtype), d_gamma, tf.reduce_sum(dy_mean, [0, 1]) * count
