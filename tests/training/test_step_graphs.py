"""The compiled step is traced once per image size, and not for each step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.training.delayed_readback import DelayedReadback
from hybrid_imagenet.training.step import TrainStep


@pytest.fixture
def step():
    """Returns the step of a small network for images of any size."""
    image = keras.Input((None, None, 3))
    logits = keras.layers.Dense(4)(
        keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(3, 3)(image))
    )
    communicator = SingleProcess()
    optimizer = DistributedOptimizer(
        optimizers.create("sgd", weight_decay=0.0, learning_rate=0.1),
        loss_scale=1,
        communicator=communicator,
    )
    return TrainStep(keras.Model(image, logits), optimizer, lambda batch: batch["image"])


def batch(side, images=2):
    pixels = np.random.default_rng(side).normal(size=(images, side, side, 3)).astype(np.float32)
    return {"image": tf.constant(pixels), "label": tf.zeros([images], tf.int32)}


def test_step_is_traced_once_per_image_size(step):
    for side in (8, 8, 12, 12, 16, 8, 16, 12):
        step.update(batch(side))
    assert step.update.experimental_get_tracing_count() == 3
    assert int(step.optimizer.iterations) == 8


def test_step_is_traced_per_batch_size_but_not_per_number_of_micro_batches(step):
    step.prepare_accumulation()
    for images, micro_batches in ((2, 2), (2, 3), (2, 4), (4, 2), (2, 2)):
        for _ in range(micro_batches - 1):
            step.accumulate(batch(8, images))
        step.update(batch(8, images), tf.constant(float(micro_batches)))
    assert step.accumulate.experimental_get_tracing_count() == 2
    assert step.update.experimental_get_tracing_count() == 2
    # An update without accumulation is another graph.
    step.update(batch(8))
    assert step.update.experimental_get_tracing_count() == 3


def test_delayed_readback_inside_its_context_reads_values_of_two_steps_ago():
    count = tf.Variable(0, dtype=tf.int64)
    pair = tf.Variable([0.0, 0.0])
    telemetry = DelayedReadback({"count": count, "pair": pair}, delay_steps=2)
    readings = []
    for step in range(1, 9):
        count.assign(step)
        pair.assign([step, -step])
        telemetry.copy_if_due(step, every_steps=4)
        if step % 4 == 0:
            with telemetry.reading_copy(step):
                readings.append(
                    (
                        telemetry.age_steps,
                        telemetry.read("count").tolist(),
                        telemetry.read("pair").tolist(),
                    )
                )
            assert (telemetry.age_steps, telemetry.read("count").tolist()) == (0, [step])
    assert readings == [(2, [2.0], [2.0, -2.0]), (2, [6.0], [6.0, -6.0])]


def test_delayed_readback_without_a_copy_reads_the_current_value():
    count = tf.Variable(1, dtype=tf.int64)
    telemetry = DelayedReadback({"count": count}, delay_steps=2)
    telemetry.copy_if_due(2, every_steps=4)
    # At the end of an epoch the variable is reset, so the copy is discarded.
    telemetry.discard_copy()
    count.assign(7)
    with telemetry.reading_copy(4):
        assert (telemetry.age_steps, telemetry.read("count").tolist()) == (0, [7.0])
