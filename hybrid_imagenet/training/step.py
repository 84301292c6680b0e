"""Compiles the training and evaluation steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.image_mixing import ImageMixer, MixedLabels
from hybrid_imagenet.models import kernels, layers, normalization
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.training.accumulators import SumAccumulator
from hybrid_imagenet.training.late_copies import LateCopies
from hybrid_imagenet.training.loss_alarm import LossAlarm, highest_loss
from hybrid_imagenet.training.losses import Loss, cross_entropy, mixed_loss, weighted_loss
from hybrid_imagenet.xla import compile_on_gpu, has_gpu

_LAG = 2  # steps, after which a GPU has made a copy and still has work

Batch = Mapping[str, tf.Tensor]
Labels: TypeAlias = tf.Tensor | MixedLabels
Preprocess = Callable[[Batch], tf.Tensor]
Choose = Callable[[Batch], tuple[Batch, tf.Tensor]]


class PerShape:
    """Compiles a function of a batch and more tensors, and remembers its trace for each shape of
    the images.

    A tf.function looks up its trace at each call, from the types of all arguments; for a step with
    hundreds of variables that takes as long as the call itself (`benchmarks loop`).
    """

    def __init__(self, function: Callable[..., Any]):
        """Traces `function(batch, ...)` when it is first called with images of a shape and type."""
        self._function = tf.function(function, autograph=False)
        self._traces: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, batch: Batch, *more: tf.Tensor) -> Any:
        """Runs the function; `more` have the same shapes at every call."""
        images = batch["image"]
        key = (images.dtype, *images.shape)
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = self.get_concrete_function(batch, *more)
        return trace(batch, *more)

    def get_concrete_function(self, *arguments: Any) -> Any:
        """Returns the trace for such arguments; tensors or TensorSpecs."""
        return self._function.get_concrete_function(*arguments)

    def experimental_get_tracing_count(self) -> int:
        """Returns how often the function was traced."""
        return self._function.experimental_get_tracing_count()


class TrainStep:
    """Runs forward, loss, scaled backward, reduction and update as one graph; nothing is fetched to
    the host.

    With accumulation over k micro-batches the first k - 1 go through `accumulate`, which only adds
    up gradients; the last goes through `last`, which reduces and applies their mean. `single` is
    the step without accumulation. Each is traced once per batch shape:

      single(batch, control): one update from one batch; adds up `control` (int32 [k]) over ranks,
      see `requests`. accumulate(batch): adds the gradients of one micro-batch.
      last(batch, control, micro_batches): one update from the mean over `micro_batches` (float32
        scalar) micro-batches, this one included; adds up `control`.

    They return nothing: TensorFlow would tie a result to all that a step does, on the host and on a
    GPU, and so the one would wait for the other.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: DistributedOptimizer,
        preprocess: Preprocess,
        communicator: Communicator,
        *,
        loss: Loss = cross_entropy,
        label_smoothing: float = 0.0,
        jit_compile: bool = False,
        jit_update: bool = False,
        choose: Choose | None = None,
        mixer: ImageMixer | None = None,
        class_weights: npt.NDArray[np.float32] | None = None,
    ):
        """Builds the optimizer's state for the model.

        Args:
          model: gives float32 logits [b, classes] for images in its compute type.
          optimizer: reduces and applies gradients.
          preprocess: augments a batch {"image": uint8, ...} on the device; images in the compute
          type.
          communicator: adds up the control word over ranks.
          loss: one of `losses.LOSSES`.
          label_smoothing: see there.
          jit_compile: compile forward and backward with XLA; the reduction stays outside and does
          not overlap.
          jit_update: with `jit_compile` and a single rank, compile a step without accumulation as
            one program, see `_whole_step`.
          choose: leaves out images of a batch; returns the others, and the weight of this rank's
            mean loss.
          mixer: what `preprocess` has mixed the images with; gives the labels of the mixed images.
          class_weights: what the loss of an image of each class is multiplied by, float32
            [classes]; None for no weights.
        """
        self.model = model
        self.optimizer = optimizer
        self.sums = SumAccumulator("train_sums")
        highest = highest_loss(int(model.output_shape[-1]), summed=loss is not cross_entropy)
        if class_weights is not None:
            highest *= max(1.0, float(class_weights.max()))
            loss = weighted_loss(loss, class_weights)
        self.alarm = LossAlarm(highest)
        self._preprocess = preprocess
        self._communicator = communicator
        self._loss = loss
        self._label_smoothing = label_smoothing
        self._choose = choose
        self._mixer = mixer
        one_by_one = jit_compile or not has_gpu()  # XLA fuses casts by itself
        self._kernels = [] if one_by_one else layers.kernels_to_cast(model)
        with tf.device("CPU:0"):
            self._requests = tf.Variable(
                tf.zeros([0], tf.int32), shape=[None], trainable=False, name="requests"
            )
        self.single, self.accumulate, self.last = (
            PerShape(f) for f in (self._single, self._accumulate, self._last)
        )
        self._forward_backward = self._loss_and_gradients
        if jit_compile:
            self._forward_backward = tf.function(
                self._loss_and_gradients, autograph=False, jit_compile=True
            )
        self._compute_and_update = self._passes_and_update
        if jit_compile and jit_update and communicator.size == 1:
            self._compute_and_update = self._whole_step
        optimizer.build(model.trainable_variables)
        telemetry = {
            "sums": self.sums.variable,
            "alarm": self.alarm.variable,
            **optimizer.telemetry_variables(),
        }
        self.copies = LateCopies(telemetry, _LAG if has_gpu() else 0)

    def requests(self) -> npt.NDArray[np.int32]:
        """Returns the sum over ranks of the last step's control words; no device is waited for."""
        found: npt.NDArray[np.int32] = self._requests.numpy()
        return found

    def _single(self, batch: Batch, control: tf.Tensor) -> None:
        self._compute_and_update(batch)
        self._sum_requests(control)

    def _accumulate(self, batch: Batch) -> None:
        self.optimizer.accumulator.add(self._gradients(batch))

    def _last(self, batch: Batch, control: tf.Tensor, micro_batches: tf.Tensor) -> None:
        gradients = self.optimizer.accumulator.mean(self._gradients(batch), micro_batches)
        self._update(gradients)
        self._sum_requests(control)
        self.optimizer.accumulator.reset()

    def _passes_and_update(self, batch: Batch) -> None:
        """Computes gradients, reduces them over ranks and updates the variables."""
        self._update(self._gradients(batch))

    def _whole_step(self, batch: Batch) -> None:
        """Does the same for a single rank as one XLA program.

        Without it the update starts after the program of forward and backward pass, and its
        programs read all gradients and weights again. On an H200 1.8 ms of a step of 35.0 ms were
        outside of the compiled program; the gain of this form has not been measured yet.

        Augmentation stays outside, because XLA does not know all of its operations. So do the
        hyperparameters, because a program for a GPU cannot read variables of the CPU.
        """
        hyperparameters = self.optimizer.inner.hyperparameters

        def program(images: tf.Tensor, labels: Labels, scalars: tf.Tensor) -> None:
            with hyperparameters.passed_as(scalars):
                self._update(self._gradients_of(images, labels, None))

        compiled = tf.function(program, autograph=False, jit_compile=True)
        compiled(*self._images_and_labels(batch), hyperparameters.vector())

    def _update(self, gradients: list[tf.Tensor]) -> None:
        """Takes the gradients of this rank, for the scaled loss."""
        reduced = self.optimizer.reduce(gradients)  # means over ranks, float32, still scaled
        self.optimizer.update_if_finite(reduced)
        self.alarm.advance()

    def _sum_requests(self, control: tf.Tensor) -> None:
        """Adds up the control word over ranks, on the hosts."""
        with tf.device("CPU:0"):
            self._requests.assign(self._communicator.allreduce_on_host(control, "control"))

    def forward(self, batch: Batch) -> tf.Tensor:
        """Returns the logits in training mode, float32 [b, classes]; changes nothing but the
        statistics, to its own.
        """
        with normalization.without_moving_average(self.model):
            return self.model(self._preprocess(batch), training=True)

    def prepare_accumulation(self) -> None:
        """Creates the sums of gradients; needed before `accumulate`."""
        self.optimizer.accumulator.build(self.model.trainable_variables)

    def _gradients(self, batch: Batch) -> list[tf.Tensor]:
        weight = None
        if self._choose is not None:
            batch, weight = self._choose(batch)
        return self._gradients_of(*self._images_and_labels(batch), weight)

    def _images_and_labels(self, batch: Batch) -> tuple[tf.Tensor, Labels]:
        images = self._preprocess(batch)
        if self._mixer is None:
            return images, batch["label"]
        mixed_labels = compile_on_gpu(self._mixer.labels)
        return images, mixed_labels(batch["label"], batch["seed"], images.shape[1])

    def _gradients_of(
        self, images: tf.Tensor, labels: Labels, weight: tf.Tensor | None
    ) -> list[tf.Tensor]:
        losses, logits, gradients = self._forward_backward(images, labels, weight)
        self.sums.add(losses, logits, labels)
        self.alarm.judge(losses)
        return gradients

    def _loss_and_gradients(
        self, images: tf.Tensor, labels: Labels, weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        with (
            kernels.fused_kernel_casts(self._kernels) as cast,
            normalization.deferred_statistics_update() if has_gpu() else contextlib.nullcontext(),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            sources = [cast.get(id(v), v.value) for v in self.model.trainable_variables]
            tape.watch(sources)
            logits = self.model(images, training=True)
            losses, scaled = compile_on_gpu(self._objective)(logits, labels, weight)
        return losses, logits, tape.gradient(scaled, sources)

    def _objective(
        self, logits: tf.Tensor, labels: Labels, weight: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the losses of the images and the scaled mean, from which the gradients start."""
        if isinstance(labels, MixedLabels):
            losses = mixed_loss(self._loss, logits, labels, self._label_smoothing)
        else:
            losses = self._loss(logits, labels, self._label_smoothing)
        loss = tf.reduce_mean(losses)
        return losses, self.optimizer.scale_loss(loss if weight is None else weight * loss)


class EvaluationStep:
    """Runs inference on one batch, adding to weighted sums on the device."""

    def __init__(
        self,
        model: keras.Model,
        preprocess: Preprocess,
        *,
        loss: Loss = cross_entropy,
        flip: bool = False,
    ):
        """Evaluates `model` on images that `preprocess` makes of a batch, by one of
        `losses.LOSSES`.

        With `flip` the scores are the means of those of an image and of its mirror image, left for
        right.
        """
        self.model = model
        self.sums = SumAccumulator("validation_sums")
        self._preprocess = preprocess
        self._loss = loss
        self._flip = flip
        self._compiled = PerShape(self._add)

    def __call__(self, batch: Batch) -> tf.Tensor:
        """Adds the examples of {"image", "label", "weight"} whose weight is not 0.

        Returns float32 [b, 3]: label + 1, predicted class + 1, its probability; 0 where the weight
        is 0.
        """
        return self._compiled(batch)

    def _add(self, batch: Batch) -> tf.Tensor:
        images = self._preprocess(batch)
        logits = self.model(images, training=False)
        if self._flip:
            logits = 0.5 * (logits + self.model(tf.reverse(images, [2]), training=False))
        losses = self._loss(logits, batch["label"], 0.0)
        self.sums.add(losses, logits, batch["label"], batch["weight"])
        classes = tf.stack(
            [batch["label"], tf.argmax(logits, axis=-1, output_type=batch["label"].dtype)], axis=1
        )
        probability = tf.reduce_max(tf.nn.softmax(logits), axis=-1, keepdims=True)
        found = tf.concat([tf.cast(classes + 1, tf.float32), probability], axis=1)
        return tf.where(batch["weight"][:, tf.newaxis] > 0, found, tf.zeros_like(found))
