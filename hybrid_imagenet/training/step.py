"""Compiles the training step and the evaluation step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.data.image_mixing import ImageMixer, MixedLabels
from hybrid_imagenet.models import kernels, layers, normalization
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.training.accumulators import SumAccumulator
from hybrid_imagenet.training.delayed_readback import DelayedReadback
from hybrid_imagenet.training.loss_alarm import LossAlarm, highest_loss
from hybrid_imagenet.training.losses import Loss, cross_entropy, mixed_loss, weighted_loss
from hybrid_imagenet.xla import compile_on_gpu, has_gpu

# After this many steps a GPU has made a copy, and still has steps to run while the host reads it.
READBACK_DELAY_STEPS = 2

Batch = Mapping[str, tf.Tensor]
Labels: TypeAlias = tf.Tensor | MixedLabels
Preprocess = Callable[[Batch], tf.Tensor]
SubsampleBatch = Callable[[Batch], tuple[Batch, tf.Tensor]]


class TrainStep:
    """Computes gradients, reduces them over ranks and updates the model, as one compiled function.

    `_update` has the mathematics, from top to bottom. It calls:

        _gradients
            _images_and_labels    augmentation and normalization of the images
            _loss_and_gradients   forward and backward pass
        optimizer.reduce          means over ranks
        optimizer.update_if_finite

    There are two compiled forms, `update` and `accumulate`. With gradient accumulation over k
    micro-batches, the first k - 1 of them only add up gradients. The last one reduces and applies
    the mean of all k.

    Returning a tensor would make the host wait for the whole step, so steps return None. Values for
    the log are in `telemetry`.

    Attributes:
      update: Called with (batch): one update from one batch. Called with (batch,
        num_micro_batches): one update from the mean over all micro-batches, this one included; the
        number is a float32 scalar.
      accumulate: Called with (batch); adds the gradients of a micro-batch that is not the last.
      jit_compile: Whether XLA compiles forward and backward pass.
      sums: Loss and accuracy of the epoch so far, on this rank.
      alarm: The first step whose loss has diverged.
      telemetry: Reads sums, alarm and the optimizer's values without waiting for the device.

    Both functions are traced once for each shape of the batch.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: DistributedOptimizer,
        preprocess: Preprocess,
        *,
        loss: Loss = cross_entropy,
        label_smoothing: float = 0.0,
        jit_compile: bool = False,
        subsample_batch: SubsampleBatch | None = None,
        mixer: ImageMixer | None = None,
        class_weights: npt.NDArray[np.float32] | None = None,
    ):
        """Builds the state of the optimizer for the model.

        Args:
          model: Returns float32 logits [b, classes] for images in its compute type.
          optimizer: Reduces and applies gradients.
          preprocess: Augments a batch {"image": uint8, ...} on the device, and returns images in
            the compute type.
          loss: One of `losses.LOSSES`.
          label_smoothing: Argument of the loss, in [0, 1].
          jit_compile: Whether to compile forward and backward pass with XLA. The reduction stays
            outside, and does not overlap with the backward pass.
          subsample_batch: Returns the images of a batch that are used, and the weight of this
            rank's mean loss among those of all ranks; None uses all images. Not with
            `jit_compile`, because the number of images is different in each step.
          mixer: Mixes labels as `preprocess` mixes images; None if it does not mix them.
          class_weights: Factor on the loss of each class, float32 [classes]; None for no factors.

        Raises:
          ValueError: For `subsample_batch` with `jit_compile`.
        """
        if subsample_batch is not None and jit_compile:
            raise ValueError("subsample_batch cannot be combined with jit_compile")
        self.model = model
        self.optimizer = optimizer
        self.jit_compile = jit_compile
        self.sums = SumAccumulator("train_sums")
        threshold = highest_loss(int(model.output_shape[-1]), summed=loss is not cross_entropy)
        if class_weights is not None:
            threshold *= max(1.0, float(class_weights.max()))
            loss = weighted_loss(loss, class_weights)
        self.alarm = LossAlarm(threshold)
        self._preprocess = preprocess
        self._loss = loss
        self._label_smoothing = label_smoothing
        self._subsample_batch = subsample_batch
        self._mixer = mixer
        optimizer.build(model.trainable_variables)
        self._compile(jit_compile)
        self.telemetry = DelayedReadback(
            {
                "sums": self.sums.variable,
                "alarm": self.alarm.variable,
                **optimizer.telemetry_variables(),
            },
            READBACK_DELAY_STEPS if has_gpu() else 0,
        )

    # The mathematics of a step

    def _update(self, batch: Batch, num_micro_batches: tf.Tensor | None = None) -> None:
        """Takes one step from a batch, or from the last of several micro-batches."""
        accumulator = self.optimizer.accumulator
        gradients = self._gradients(batch)
        if num_micro_batches is not None:
            gradients = accumulator.mean(gradients, num_micro_batches)
        # The means over ranks are still those of the scaled loss.
        reduced = self.optimizer.reduce(gradients)
        self.optimizer.update_if_finite(reduced)
        self.alarm.advance()
        if num_micro_batches is not None:
            accumulator.reset()

    def _accumulate(self, batch: Batch) -> None:
        """Adds the gradients of a micro-batch that is not the last one to the sums."""
        self.optimizer.accumulator.add(self._gradients(batch))

    def _gradients(self, batch: Batch) -> list[tf.Tensor]:
        """Returns this rank's gradients of the scaled loss.

        It also adds loss and accuracy to the sums, and checks the loss.
        """
        weight = None
        if self._subsample_batch is not None:
            batch, weight = self._subsample_batch(batch)
        images, labels = self._images_and_labels(batch)
        losses, logits, gradients = self._compiled_loss_and_gradients(images, labels, weight)
        self.sums.add(losses, logits, labels)
        self.alarm.check(losses)
        return gradients

    def _images_and_labels(self, batch: Batch) -> tuple[tf.Tensor, Labels]:
        images = self._preprocess(batch)
        if self._mixer is None:
            return images, batch["label"]
        mixed_labels = compile_on_gpu(self._mixer.labels)
        return images, mixed_labels(batch["label"], batch["seed"], images.shape[1])

    def _loss_and_gradients(
        self, images: tf.Tensor, labels: Labels, weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns the losses of the images, their logits, and the gradients of the scaled mean."""
        with (
            kernels.fused_kernel_casts(self._kernels_to_cast) as casts,
            normalization.deferred_statistics_update() if has_gpu() else contextlib.nullcontext(),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            weights = [casts.get(id(v), v.value) for v in self.model.trainable_variables]
            tape.watch(weights)
            logits = self.model(images, training=True)
            losses, scaled = compile_on_gpu(self._objective)(logits, labels, weight)
        return losses, logits, tape.gradient(scaled, weights)

    def _objective(
        self, logits: tf.Tensor, labels: Labels, weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the losses of the images, and the scaled mean that is differentiated."""
        if isinstance(labels, MixedLabels):
            losses = mixed_loss(self._loss, logits, labels, self._label_smoothing)
        else:
            losses = self._loss(logits, labels, self._label_smoothing)
        loss = tf.reduce_mean(losses)
        return losses, self.optimizer.scale_loss(loss if weight is None else weight * loss)

    # The compiled forms

    def _compile(self, jit_compile: bool) -> None:
        """Creates the functions that the host calls; they are traced at their first calls."""
        # XLA fuses casts by itself.
        casts_one_by_one = jit_compile or not has_gpu()
        self._kernels_to_cast = [] if casts_one_by_one else layers.kernels_to_cast(self.model)
        self._compiled_loss_and_gradients = self._loss_and_gradients
        if jit_compile:
            self._compiled_loss_and_gradients = tf.function(
                self._loss_and_gradients, autograph=False, jit_compile=True
            )
        self.update = FunctionPerShape(self._update)
        self.accumulate = FunctionPerShape(self._accumulate)

    def prepare_accumulation(self) -> None:
        """Creates the sums of gradients; call it before `accumulate`."""
        self.optimizer.accumulator.build(self.model.trainable_variables)

    # Statistics of normalization

    def forward(self, batch: Batch) -> tf.Tensor:
        """Returns the logits in training mode, float32 [b, classes].

        It changes nothing but the statistics of normalization, which it sets to those of the batch.
        """
        with normalization.without_moving_average(self.model):
            return self.model(self._preprocess(batch), training=True)


class EvaluationStep:
    """Runs inference on one batch, and adds the results to sums on the device."""

    def __init__(
        self,
        model: keras.Model,
        preprocess: Preprocess,
        *,
        loss: Loss = cross_entropy,
        flip: bool = False,
    ):
        """Starts with sums of 0.

        Args:
          model: Returns float32 logits [b, classes].
          preprocess: Returns the images of a batch, in the compute type of the model.
          loss: One of `losses.LOSSES`.
          flip: Average the logits of an image with those of its horizontal mirror image.
        """
        self.model = model
        self.sums = SumAccumulator("validation_sums")
        self._preprocess = preprocess
        self._loss = loss
        self._flip = flip
        self._compiled = FunctionPerShape(self._add)

    def __call__(self, batch: Batch) -> tf.Tensor:
        """Adds the examples of a batch {"image", "label", "weight"} whose weight is not 0.

        Returns:
          float32 [b, 3]: label + 1, predicted class + 1 and its probability; 0 where the weight is
          0.
        """
        return self._compiled(batch)

    def _add(self, batch: Batch) -> tf.Tensor:
        images = self._preprocess(batch)
        logits = self.model(images, training=False)
        if self._flip:
            logits = 0.5 * (logits + self.model(tf.reverse(images, [2]), training=False))
        labels = batch["label"]
        losses = self._loss(logits, labels, 0.0)
        self.sums.add(losses, logits, labels, batch["weight"])
        predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
        classes = tf.stack([labels, predicted], axis=1)
        probability = tf.reduce_max(tf.nn.softmax(logits), axis=-1, keepdims=True)
        rows = tf.concat([tf.cast(classes + 1, tf.float32), probability], axis=1)
        return tf.where(batch["weight"][:, tf.newaxis] > 0, rows, tf.zeros_like(rows))


class FunctionPerShape:
    """Compiles a function of a batch and more tensors, and keeps a trace for each image shape.

    Each number of arguments has its own traces.

    A tf.function looks up its trace at each call, from the types of all arguments. For a step with
    hundreds of variables that takes as long as the call itself (`python -m benchmarks loop`).
    """

    def __init__(self, function: Callable[..., Any]):
        """Wraps `function(batch, ...)`, which is traced at its first call with each image shape."""

        # A trace needs all parameters of its function, so this one has no default values.
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return function(*arguments)

        # TensorFlow would read the parameters of the wrapped function.
        del call.__wrapped__
        self._function = tf.function(call, autograph=False)
        self._traces: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, batch: Batch, *more: tf.Tensor) -> Any:
        """Calls the function.

        Args:
          batch: Tensors of any shape.
          *more: Tensors, each of the same shape at every call. The last ones may be left out.
        """
        images = batch["image"]
        key = (len(more), images.dtype, *images.shape)
        trace = self._traces.get(key)
        if trace is None:
            trace = self.get_concrete_function(batch, *more)
            self._traces[key] = trace
        return trace(batch, *more)

    def get_concrete_function(self, *arguments: Any) -> Any:
        """Returns the trace for arguments like these, which may be tensors or TensorSpecs."""
        return self._function.get_concrete_function(*arguments)

    def experimental_get_tracing_count(self) -> int:
        """Returns how often the function was traced."""
        return self._function.experimental_get_tracing_count()
