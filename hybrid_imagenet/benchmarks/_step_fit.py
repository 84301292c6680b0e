"""Implementation: a step of this package's ResNet with LARS, through the program's own loop or through `model.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet import models
from hybrid_imagenet.benchmarks._step_protocol import serve, settings
from hybrid_imagenet.benchmarks._step_tensorflow import batch_of, limit_threads
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.kinds import classify
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.training.step import TrainStep

_RATE = 0.1


def through_program(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> Callable[[int], float]:
    """Steps as `training.loop` makes them."""
    ranks = SingleProcess()
    inner = hi.optimizers.LARS(_RATE)
    inner.set_kinds(classify(model))
    scale = LossScale(2.0**15, dynamic=True)
    step = TrainStep(model, DistributedOptimizer(inner, ranks, scale), lambda batch: batch["image"], ranks)
    batch, control = {"image": images, "label": labels}, tf.zeros([2], tf.int32)

    def run(steps: int) -> float:
        for _ in range(steps):
            step.single(batch, control)
        return float(step.sums.read().loss)

    return run


def through_fit(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> Callable[[int], float]:
    """Steps of `model.fit`, an epoch of as many as are asked for."""
    schedule = hi.schedules.constant(_RATE, 1000)
    model.compile(
        hi.DistributedOptimizer(hi.optimizers.LARS(_RATE), schedule=schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5)],
    )
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    callbacks = hi.callbacks.default_callbacks()

    def run(steps: int) -> float:
        history = model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=callbacks)
        return float(history.history["loss"][-1])

    return run


def main() -> None:
    """Builds the model and serves steps."""
    options: dict[str, Any] = settings()
    limit_threads(options)
    hi.init(options["threads"])
    model = models.create(
        options["model"],
        options["num_classes"],
        options["image_size"],
        precision=options["precision"],
        width=options["width"],
        stem=options["stem"],
    )
    images, labels = batch_of(options)
    made = {"program": through_program, "fit": through_fit}[options["through"]]
    run = made(model, tf.cast(images, model.input.dtype), labels)
    serve(run, name=options["through"], version=f"tensorflow {tf.__version__}, keras {keras.__version__}")


main()
