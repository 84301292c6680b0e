"""The compiled step: one graph for each size of images, none per step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.training.step import TrainStep


@pytest.fixture
def step():
    image = keras.Input((None, None, 3))
    logits = keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(3, 3)(image)))
    ranks = SingleProcess()
    optimizer = DistributedOptimizer(optimizers.create("sgd", weight_decay=0.0, learning_rate=0.1), ranks)
    return TrainStep(keras.Model(image, logits), optimizer, lambda batch: batch["image"], ranks)


def batch(side, images=2):
    pixels = np.random.default_rng(side).normal(size=(images, side, side, 3)).astype(np.float32)
    return {"image": tf.constant(pixels), "label": tf.zeros([images], tf.int32)}


def test_one_graph_per_size_of_images(step):
    control = tf.constant([0, 0])
    for side in (8, 8, 12, 12, 16, 8, 16, 12):
        step.single(batch(side), control)
    assert step.single.experimental_get_tracing_count() == 3
    assert int(step.optimizer.iterations) == 8


def test_one_graph_per_batch_and_none_per_number_of_micro_batches(step):
    control = tf.constant([0, 0])
    step.prepare_accumulation()
    for images, micro_batches in ((2, 2), (2, 3), (2, 4), (4, 2), (2, 2)):
        for _ in range(micro_batches - 1):
            step.accumulate(batch(8, images))
        step.last(batch(8, images), control, tf.constant(float(micro_batches)))
    assert step.accumulate.experimental_get_tracing_count() == 2
    assert step.last.experimental_get_tracing_count() == 2
