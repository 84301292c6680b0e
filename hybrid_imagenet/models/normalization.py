"""Batch normalization on TensorFlow's fused kernel, with the statistics of the papers.

Statistics are FP32 in every compute type. Normalization may cover a rank's batch, the batches of
several ranks, or each virtual GPU's part of a batch.
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

_pending_updates: contextvars.ContextVar[list[_BatchStatistics] | None] = contextvars.ContextVar(
    "pending_statistics_updates", default=None
)


@contextlib.contextmanager
def deferred_statistics_update() -> Iterator[None]:
    """Defers the updates of all layers' statistics to the end of the block.

    There they are made together. On a GPU that is one compiled program, instead of at least one
    kernel launch per layer.
    """
    pending: list[_BatchStatistics] = []
    token = _pending_updates.set(pending)
    try:
        yield
    finally:
        _pending_updates.reset(token)
    kinds = {(batch.layer.mode, batch.layer.momentum) for batch in pending}
    for kind in sorted(kinds):
        _update_statistics(
            [batch for batch in pending if (batch.layer.mode, batch.layer.momentum) == kind]
        )


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class BatchNormalization(keras.layers.BatchNormalization):
    """Normalizes each channel of [b, h, w, c]; the output has the compute type.

    In training the batch's own mean and biased variance are used. `mode` says what is stored for
    inference:

    * `last`: the statistics of this batch (Lu et al. §2.2.3-1, who use no moving average).
    * `moving`: their moving average, `momentum * old + (1 - momentum) * batch`.
    * `precise`: the same as `last`. The caller runs further batches through frozen weights and
      merges the statistics of all of them.

    With `trainable` off, training uses the stored statistics and does not change them.

    Args:
      mode: See above.
      momentum: Decay of the moving average.
      epsilon: Added to the variance.
      allreduce: `(tensor, name) -> sum over ranks`. If set, mean and mean of squares cover the
        batches of these ranks, which may be all (Mikami et al.) or a group, and gradients flow
        through the sums. It is not part of the layer's configuration, so a reloaded layer
        normalizes each rank's batch by itself.
      virtual_gpus: Number of virtual GPUs (--virtual_gpus) whose batches a training batch consists
        of, one after the other. Each is normalized by itself and has its own moving average. The
        stored statistics are merged over them. Not part of the configuration either.

    Attributes:
      deviations: Distance of each virtual GPU's moving mean and moving variance from the stored
        statistics, FP32 [2, virtual_gpus, c]; 0 after `merge_virtual_gpus`. None if there are no
        such moving averages.
    """

    def __init__(
        self,
        mode: str = "last",
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        allreduce: Callable[[tf.Tensor, str], tf.Tensor] | None = None,
        virtual_gpus: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(momentum=momentum, epsilon=epsilon, **kwargs)
        self.mode = mode
        self.allreduce = allreduce
        self.virtual_gpus = virtual_gpus
        self.deviations: tf.Variable | None = None

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        if self.mode == "moving" and self.virtual_gpus > 1:
            with tf.init_scope():
                self.deviations = tf.Variable(
                    tf.zeros([2, self.virtual_gpus, input_shape[-1]]), trainable=False
                )

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        """Normalizes [b, h, w, c]; training also updates the stored statistics."""
        if not training or not self.trainable:
            return self._fused_kernel(
                inputs, self.moving_mean, self.moving_variance, training=False
            )[0]
        scale = self.gamma.value
        offset = self.beta.value
        if self.virtual_gpus > 1:
            outputs, means, variances = normalize_per_virtual_gpu(
                inputs, scale, offset, self.epsilon, self.virtual_gpus
            )
            self._update_from_virtual_gpus(means, variances)
            return outputs
        if self.allreduce is None:
            outputs, batch = self._normalize_batch(inputs)
        else:
            outputs, mean, variance = normalize_over_ranks(
                inputs, scale, offset, self.epsilon, self.allreduce, self.path
            )
            batch = _BatchStatistics(self, mean, variance)
        _record(batch)
        return outputs

    def record_statistics(self, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Updates the stored statistics by those of a batch that a program has normalized.

        Args:
          mean: FP32 [c].
          variance: Biased, FP32 [c].
        """
        _record(_BatchStatistics(self, mean, variance))

    def _update_from_virtual_gpus(self, means: tf.Tensor, variances: tf.Tensor) -> None:
        """Updates the stored statistics by those of a batch, each FP32 [virtual_gpus, c]."""
        if self.deviations is not None:
            old_means = self.moving_mean + self.deviations[0]
            old_variances = self.moving_variance + self.deviations[1]
            means = self.momentum * old_means + (1.0 - self.momentum) * means
            variances = self.momentum * old_variances + (1.0 - self.momentum) * variances
        mean, variance = merge_statistics(means, variances)
        self.moving_mean.assign(mean)
        self.moving_variance.assign(variance)
        if self.deviations is not None:
            self.deviations.assign(tf.stack([means - mean, variances - variance]))

    def _normalize_batch(self, inputs: tf.Tensor) -> tuple[tf.Tensor, _BatchStatistics]:
        """Normalizes by the batch's statistics; returns outputs and statistics."""
        outputs, mean, unbiased_variance = self._fused_kernel(
            inputs, tf.zeros([0]), tf.zeros([0]), training=True
        )
        if inputs.shape.is_fully_defined():
            count = np.float32(math.prod(inputs.shape[:3]))
        else:
            shape = tf.shape(inputs)
            count = tf.cast(shape[0] * shape[1] * shape[2], tf.float32)
        # The kernel returns the variance with Bessel's correction n / (n - 1). It must be undone,
        # because statistics are merged over ranks by way of E[x^2].
        return outputs, _BatchStatistics(self, mean, unbiased_variance, (count - 1) / count)

    def _fused_kernel(
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
        """Returns the arguments that rebuild the layer, without `allreduce`, `virtual_gpus`."""
        return super().get_config() | {"mode": self.mode}


@dataclasses.dataclass(frozen=True)
class _BatchStatistics:
    """Holds the statistics of a layer's batch.

    Attributes:
      layer: The layer.
      mean: FP32 [c].
      variance: FP32 [c]; biased, or unbiased if there is a factor.
      bessel_factor: (n - 1) / n, a scalar by which `variance` becomes the biased variance; None if
        it is already biased.
    """

    layer: BatchNormalization
    mean: tf.Tensor
    variance: tf.Tensor
    bessel_factor: Any = None


def _record(batch: _BatchStatistics) -> None:
    """Updates a layer's stored statistics now, or at the end of `deferred_statistics_update`."""
    pending = _pending_updates.get()
    if pending is None:
        _update_statistics([batch])
    else:
        pending.append(batch)


def _update_statistics(batches: Sequence[_BatchStatistics]) -> None:
    """Updates the stored statistics of layers with the same mode and momentum."""
    layers = [batch.layer for batch in batches]
    mode = layers[0].mode
    momentum = layers[0].momentum

    def update(
        means: list[tf.Tensor],
        variances: list[tf.Tensor],
        old_means: list[tf.Tensor],
        old_variances: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        biased_variances = []
        for batch, variance in zip(batches, variances, strict=True):
            if batch.bessel_factor is None:
                biased_variances.append(variance)
            else:
                biased_variances.append(variance * batch.bessel_factor)
        new_mean = _concatenate(means)
        new_variance = _concatenate(biased_variances)
        if mode == "moving":
            new_mean = momentum * _concatenate(old_means) + (1.0 - momentum) * new_mean
            new_variance = momentum * _concatenate(old_variances) + (1.0 - momentum) * new_variance
        return new_mean, new_variance

    # The vectors of all layers are concatenated inside one compiled program, so a GPU launches a
    # few kernels instead of several per layer. A single layer has nothing to be fused with.
    run = xla.compile_on_gpu(update) if len(layers) > 1 else update
    mean, variance = run(
        [batch.mean for batch in batches],
        [batch.variance for batch in batches],
        [layer.moving_mean.value for layer in layers],
        [layer.moving_variance.value for layer in layers],
    )
    _assign_slices([layer.moving_mean for layer in layers], mean)
    _assign_slices([layer.moving_variance for layer in layers], variance)


def _concatenate(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]


def _assign_slices(variables: Sequence[keras.Variable], vector: tf.Tensor) -> None:
    """Assigns the slices of a vector to the variables, in order."""
    if len(variables) == 1:
        variables[0].assign(vector)
        return
    sizes = [variable.shape[0] for variable in variables]
    for variable, value in zip(variables, tf.split(vector, sizes), strict=True):
        variable.assign(value)


def merge_statistics(means: tf.Tensor, variances: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Merges the statistics of equal groups.

    Args:
      means: [groups, c].
      variances: Biased, [groups, c].

    Returns:
      Mean and biased variance over all groups, [c].
    """
    mean = tf.reduce_mean(means, 0)
    mean_square = tf.reduce_mean(moments.second_moment(means, variances, tf), 0)
    return mean, moments.biased_variance(mean, mean_square, tf)


def merge_virtual_gpus(model: keras.Model) -> None:
    """Lets all virtual GPUs continue their moving averages from the stored statistics."""
    for layer in batch_norm_layers(model):
        if layer.deviations is not None:
            layer.deviations.assign(tf.zeros_like(layer.deviations))


def batch_norm_layers(model: keras.Model) -> list[BatchNormalization]:
    """Returns the layers of this module's class, nested ones included.

    They are in the order of construction.
    """
    return [
        layer for layer in all_batch_norm_layers(model) if isinstance(layer, BatchNormalization)
    ]


def inference_statistics(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns the variables that inference uses in layers of this module's class.

    Returns:
      One pair (mean, biased variance) per layer, each FP32 [c].
    """
    return [(layer.moving_mean, layer.moving_variance) for layer in batch_norm_layers(model)]


def trainable_statistics(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns the variables that training updates on each rank by itself, in layers of Keras too.

    Layers with `synchronized=True` are not among them, because all ranks have the same statistics.

    Returns:
      One pair (mean, variance) per layer that is not frozen, each FP32 [c].
    """
    return [
        (layer.moving_mean, layer.moving_variance)
        for layer in all_batch_norm_layers(model)
        if layer.trainable and not layer.synchronized
    ]


@contextlib.contextmanager
def without_moving_average(model: keras.Model) -> Iterator[None]:
    """Sets the momentum of all layers to 0 inside the block.

    A training pass that is traced inside stores the statistics of its batch instead of a moving
    average.
    """
    momenta = {layer: layer.momentum for layer in all_batch_norm_layers(model)}
    try:
        for layer in momenta:
            layer.momentum = 0.0
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum


def all_batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns all batch-normalization layers of a model, of Keras's class too, nested included."""
    return [
        layer
        for layer in private_api.flatten_layers(model, include_self=False)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


_BATCH_AND_PIXELS = [0, 1, 2]


def normalize_over_ranks(
    inputs: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    epsilon: float,
    allreduce: Callable[[tf.Tensor, str], tf.Tensor],
    name: str,
    mask: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes by mean and variance over the ranks of a group, whose batch sizes may differ.

    Forward, one all-reduce sums means and means of squares, weighted by the number of values, and
    these numbers (Mikami et al.). The gradient is that of the sum of all ranks' losses: backward,
    one more all-reduce sums dy and dy * xhat.

    Each rank computes its variance from the differences to its mean. Over ranks the variance is
    E[x^2] - E[x]^2, so that one all-reduce suffices. These sums are float64, because the relative
    error of the difference is that of the type times 1 + mean^2 / variance: in FP32 it would be 1 %
    for inputs whose mean is 345 standard deviations.

    Args:
      inputs: Activations [b, h, w, c] in any float type.
      scale: FP32 [c].
      offset: FP32 [c].
      epsilon: Added to the variance.
      allreduce: `(tensor, name) -> sum over the ranks of the group`.
      name: Unique per layer, the same on all ranks.
      mask: FP32 [b, h, w, 1], 1 for positions that count and 0 for others, which are normalized but
        do not change mean and variance; None if all count. A rank may have none that count.

    Returns:
      Outputs in the type of the inputs, mean and biased variance (FP32 [c], clamped at 0).
    """

    def mean_over_ranks(sums: list[tf.Tensor], count: tf.Tensor, label: str) -> list[tf.Tensor]:
        total = allreduce(tf.concat([*sums, [count]], axis=0), f"{name}/{label}")
        # Without a position that counts, on any rank, the sums are 0 as well.
        return tf.split(total[:-1] / tf.maximum(total[-1], 1.0), len(sums))

    @tf.custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        if mask is None:
            count = tf.cast(tf.size(x) / tf.shape(x)[-1], tf.float32)
        else:
            count = tf.reduce_sum(mask)
        sums = allreduce(_local_sums(x, mask), f"{name}/moments")
        mean, variance = _mean_and_variance(sums)
        inverse_stddev = tf.math.rsqrt(variance + epsilon)
        outputs = _scale_and_shift(x, mean, inverse_stddev, gamma, beta)

        def gradient(d_outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            d_beta, d_gamma = _parameter_gradients(d_outputs, x, mean, inverse_stddev)
            dy_mean, product_mean = mean_over_ranks([d_beta, d_gamma], count, "gradient_moments")
            dx = _input_gradient(
                d_outputs, x, mean, inverse_stddev, gamma, dy_mean, product_mean, mask
            )
            return dx, d_gamma, d_beta

        return (outputs, mean, variance), gradient

    return normalize(inputs, scale, offset)


@xla.compile_on_gpu
def _local_sums(x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Returns sums of this rank's values and of their squares, and their number, float64 [2c + 1].

    Values that do not count are in none of them.
    """
    x_fp32 = tf.cast(x, tf.float32)
    if mask is None:
        number = tf.size(x) // tf.shape(x)[-1]
        mean = tf.reduce_mean(x_fp32, _BATCH_AND_PIXELS)
        variance = tf.reduce_mean(tf.square(x_fp32 - mean), _BATCH_AND_PIXELS)
    else:
        number = tf.reduce_sum(mask)
        count = tf.maximum(tf.reduce_sum(mask), 1.0)
        mean = tf.reduce_sum(x_fp32 * mask, _BATCH_AND_PIXELS) / count
        variance = tf.reduce_sum(tf.square(x_fp32 - mean) * mask, _BATCH_AND_PIXELS) / count
    number = tf.cast(number, tf.float64)
    mean = tf.cast(mean, tf.float64)
    second_moment = moments.second_moment(mean, tf.cast(variance, tf.float64), tf)
    return tf.concat([number * mean, number * second_moment, [number]], axis=0)


@xla.compile_on_gpu
def _mean_and_variance(sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and biased variance, FP32 [c], from the total of `_local_sums` over ranks."""
    # Without a position that counts, on any rank, the sums are 0 as well.
    mean, second_moment = tf.split(sums[:-1] / tf.maximum(sums[-1], 1.0), 2)
    variance = moments.biased_variance(mean, second_moment, tf)
    return tf.cast(mean, tf.float32), tf.cast(variance, tf.float32)


@xla.compile_on_gpu
def _scale_and_shift(
    x: tf.Tensor, mean: tf.Tensor, inverse_stddev: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor
) -> tf.Tensor:
    """Returns the normalized values, scaled and shifted, in the type of x."""
    return tf.cast((tf.cast(x, tf.float32) - mean) * (inverse_stddev * gamma) + beta, x.dtype)


@xla.compile_on_gpu
def _parameter_gradients(
    d_outputs: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse_stddev: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this rank's gradients of offset and scale: sums of dy and dy * xhat, FP32 [c]."""
    dy, xhat = _dy_and_xhat(d_outputs, x, mean, inverse_stddev)
    return tf.reduce_sum(dy, _BATCH_AND_PIXELS), tf.reduce_sum(dy * xhat, _BATCH_AND_PIXELS)


def input_gradient(
    dy: tf.Tensor, xhat: tf.Tensor, factor: tf.Tensor, dy_mean: tf.Tensor, product_mean: tf.Tensor
) -> tf.Tensor:
    """Returns the gradient of the inputs of a normalization, in FP32.

    Args:
      dy: Gradient of the scaled and shifted values, FP32.
      xhat: Normalized values, in the shape of `dy`.
      factor: Scale over standard deviation, FP32 [c].
      dy_mean: Mean of dy, FP32 [c].
      product_mean: Mean of dy * xhat, FP32 [c].
    """
    return factor * (dy - dy_mean - xhat * product_mean)


@xla.compile_on_gpu
def _input_gradient(
    d_outputs: tf.Tensor,
    x: tf.Tensor,
    mean: tf.Tensor,
    inverse_stddev: tf.Tensor,
    gamma: tf.Tensor,
    dy_mean: tf.Tensor,
    product_mean: tf.Tensor,
    mask: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the gradient of x in its type, from the means of dy and dy * xhat over ranks."""
    dy, xhat = _dy_and_xhat(d_outputs, x, mean, inverse_stddev)
    if mask is not None:
        # Positions that do not count have not changed the statistics.
        dy_mean = dy_mean * mask
        product_mean = product_mean * mask
    dx = input_gradient(dy, xhat, inverse_stddev * gamma, dy_mean, product_mean)
    return tf.cast(dx, x.dtype)


def _dy_and_xhat(
    d_outputs: tf.Tensor, x: tf.Tensor, mean: tf.Tensor, inverse_stddev: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the output gradient and the normalized values in FP32."""
    return tf.cast(d_outputs, tf.float32), (tf.cast(x, tf.float32) - mean) * inverse_stddev


def normalize_per_virtual_gpu(
    inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, virtual_gpus: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes the contiguous parts of a batch, one per virtual GPU, each by itself.

    Mean and variance are FP32; the variance is computed from the differences to the mean. XLA
    compiles forward and backward pass, which makes each a few loops over memory for any number of
    virtual GPUs.

    Args:
      inputs: Activations [virtual_gpus * b, h, w, c] in any float type.
      scale: FP32 [c].
      offset: FP32 [c].
      epsilon: Added to the variance.
      virtual_gpus: Number of parts.

    Returns:
      Outputs in the type of the inputs, means and biased variances (FP32 [virtual_gpus, c]).
    """
    shape = tf.shape(inputs)
    channels = inputs.shape[-1]

    @tf.custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        flat = tf.reshape(x, [virtual_gpus, -1, channels])
        outputs, mean, variance = _forward(flat, gamma, beta, epsilon)

        def gradient(d_outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            dy = tf.reshape(d_outputs, [virtual_gpus, -1, channels])
            dx, d_gamma, d_beta = _backward(flat, dy, gamma, mean, variance, epsilon)
            return tf.reshape(dx, shape), d_gamma, d_beta

        return (tf.reshape(outputs, shape), mean[:, 0], variance[:, 0]), gradient

    return normalize(inputs, scale, offset)


@tf.function(jit_compile=True, autograph=False)
def _forward(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns outputs [virtual_gpus, n, c], means and variances [virtual_gpus, 1, c]."""
    x_fp32 = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(x_fp32, 1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x_fp32 - mean), 1, keepdims=True)
    outputs = (x_fp32 - mean) * (tf.math.rsqrt(variance + epsilon) * gamma) + beta
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
    """Returns the gradients of inputs, scale and offset.

    The first is [virtual_gpus, n, c]; the others are summed over virtual GPUs, [c].
    """
    dy_fp32 = tf.cast(dy, tf.float32)
    inverse_stddev = tf.math.rsqrt(variance + epsilon)
    xhat = (tf.cast(x, tf.float32) - mean) * inverse_stddev
    dy_mean = tf.reduce_mean(dy_fp32, 1, keepdims=True)
    product_mean = tf.reduce_mean(dy_fp32 * xhat, 1, keepdims=True)
    dx = (inverse_stddev * gamma) * (dy_fp32 - dy_mean - xhat * product_mean)
    count = tf.cast(tf.shape(x)[1], tf.float32)
    d_gamma = tf.reduce_sum(product_mean, [0, 1]) * count
    d_beta = tf.reduce_sum(dy_mean, [0, 1]) * count
    return tf.cast(dx, x.dtype), d_gamma, d_beta
