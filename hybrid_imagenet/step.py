"""The compiled training and evaluation steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import keras
import tensorflow as tf

from hybrid_imagenet.losses import cross_entropy
from hybrid_imagenet.metrics.accumulators import SumAccumulator
from hybrid_imagenet.mixup import mix
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer

Batch = Mapping[str, tf.Tensor]
Preprocess = Callable[[Batch], tf.Tensor]


class ControlReducer(Protocol):
    """What a step needs of a communicator besides gradients."""

    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sum over ranks, inside a graph."""


class TrainStep:
    """Forward, loss, scaled backward, reduction and update as one graph; nothing is fetched to the host.

    With accumulation over k micro-batches the first k - 1 go through `accumulate`, which only adds up gradients; the
    last goes through `last`, which reduces and applies their mean. `single` is the step without accumulation. Each is
    traced once per batch shape.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: DistributedOptimizer,
        preprocess: Preprocess,
        communicator: ControlReducer,
        *,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        xla: bool = False,
    ):
        """Builds the optimizer's state for the model.

        Args:
          model: gives float32 logits [b, classes] for images in its compute type.
          optimizer: reduces and applies gradients.
          preprocess: augments a batch {"image": uint8, ...} on the device; images in the compute type.
          communicator: adds up the control word over ranks.
          label_smoothing: see `losses.cross_entropy`.
          mixup: alpha of `mixup.mix`; 0 for none. The metrics are those of the mixed images and their first labels.
          xla: compile forward and backward with XLA; reduction stays outside, so it no longer overlaps with them.
        """
        self.model = model
        self.optimizer = optimizer
        self.sums = SumAccumulator("train_sums")
        self._preprocess = preprocess
        self._communicator = communicator
        self._label_smoothing = label_smoothing
        self._mixup = mixup
        self._variables = [v.value for v in model.trainable_variables]
        self._accumulators: list[tf.Variable] = []
        self._gradients = self._loss_and_gradients
        if xla:
            self._gradients = tf.function(self._loss_and_gradients, autograph=False, jit_compile=True)
        optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def single(self, batch: Batch, control: tf.Tensor) -> tf.Tensor:
        """One update from one batch; returns the sum of `control` (int32 [k]) over ranks."""
        self.optimizer.apply(self._forward_backward(batch))
        return self._reduce_control(control)

    @tf.function(autograph=False)
    def accumulate(self, batch: Batch) -> None:
        """Adds the gradients of one micro-batch."""
        for total, grad in zip(self._accumulators, self._forward_backward(batch), strict=True):
            total.assign_add(tf.cast(grad, tf.float32))

    @tf.function(autograph=False)
    def last(self, batch: Batch, control: tf.Tensor, micro_batches: tf.Tensor) -> tf.Tensor:
        """One update from the mean over `micro_batches` (float32 scalar) micro-batches, this one included."""
        grads = []
        for total, grad in zip(self._accumulators, self._forward_backward(batch), strict=True):
            grads.append((total + tf.cast(grad, tf.float32)) / micro_batches)
        self.optimizer.apply(grads)
        for total in self._accumulators:
            total.assign(tf.zeros_like(total))
        return self._reduce_control(control)

    def forward(self, batch: Batch) -> tf.Tensor:
        """The logits in training mode, float32 [b, classes]; updates nothing but statistics of normalization."""
        return self.model(self._preprocess(batch), training=True)

    def prepare_accumulation(self) -> None:
        """Creates the accumulators (float32, as large as the weights); needed before `accumulate`."""
        if not self._accumulators:
            self._accumulators = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self._variables]

    def _forward_backward(self, batch: Batch) -> list[tf.Tensor]:
        images, share = self._preprocess(batch), tf.constant(1.0)
        if self._mixup:
            images, share = mix(images, batch["seed"], self._mixup)
        losses, logits, grads = self._gradients(images, batch["label"], share)
        self.sums.add(losses, logits, batch["label"])
        return grads

    def _loss_and_gradients(
        self, images: tf.Tensor, labels: tf.Tensor, share: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            logits = self.model(images, training=True)
            losses = cross_entropy(logits, labels, self._label_smoothing)
            if self._mixup:
                others = cross_entropy(logits, tf.reverse(labels, [0]), self._label_smoothing)
                losses = share * losses + (1.0 - share) * others
            scaled = self.optimizer.scale_loss(tf.reduce_mean(losses))
        return losses, logits, tape.gradient(scaled, self._variables)

    def _reduce_control(self, control: tf.Tensor) -> tf.Tensor:
        return self._communicator.allreduce_sum(control, "control")


class EvaluationStep:
    """Inference on one batch, adding to weighted sums on the device."""

    def __init__(self, model: keras.Model, preprocess: Preprocess):
        """Evaluates `model` on images that `preprocess` makes of a batch."""
        self.model = model
        self.sums = SumAccumulator("validation_sums")
        self._preprocess = preprocess

    @tf.function(autograph=False)
    def __call__(self, batch: Batch) -> None:
        """Adds the examples of {"image", "label", "weight"} whose weight is not 0."""
        logits = self.model(self._preprocess(batch), training=False)
        losses = cross_entropy(logits, batch["label"])
        self.sums.add(losses, logits, batch["label"], batch["weight"])
