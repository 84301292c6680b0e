"""Serves steps of this program's ResNet, for `python -m benchmarks step`.

The step of both TensorFlow implementations is here: forward pass, loss in FP32, backward pass, and
SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks._step_protocol import serve, settings
from hybrid_imagenet import xla
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.config.flags import NetworkFlags
from hybrid_imagenet.models import factory

# This must happen before the first use of a GPU.
gpus.load_cusolver()


def batch_of(options: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns normalized images, float32 [b, s, s, 3], and labels, int32 [b]."""
    generator = tf.random.Generator.from_seed(0)
    batch = options["batch"]
    size = options["image_size"]
    images = generator.normal([batch, size, size, 3])
    return images, generator.uniform([batch], 0, options["num_classes"], tf.int32)


def training_step(
    model: keras.Model, images: tf.Tensor, labels: tf.Tensor, input_type: str
) -> Callable[[int], float]:
    """Returns a function that runs a number of steps and returns the last loss."""
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(tf.cast(images, input_type), training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def run(steps: int) -> float:
        for _ in range(steps):
            loss = step(images, labels)
        return float(loss)

    return run


def build_network(options: dict[str, Any]) -> keras.Model:
    """Returns the network that a run with these settings trains."""
    return factory.create(
        options["model"],
        options["num_classes"],
        options["image_size"],
        width=options["width"],
        stem=options["stem"],
        precision=options["precision"],
        # As in `training.build.model`: on a CPU separate layers are faster.
        jit_stem=NetworkFlags.jit_stem and xla.has_gpu(),
    )


def main() -> None:
    """Builds the model and serves steps."""
    options = settings()
    tf.config.threading.set_intra_op_parallelism_threads(options["threads"])
    model = build_network(options)
    images, labels = batch_of(options)
    step = training_step(model, images, labels, model.input.dtype)
    serve(
        step,
        name="hybrid_imagenet",
        version=f"tensorflow {tf.__version__}, keras {keras.__version__}",
    )


if __name__ == "__main__":
    main()
