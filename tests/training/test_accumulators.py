"""Sums of loss and correct predictions over batches."""

import numpy as np
import tensorflow as tf

from hybrid_imagenet.training.accumulators import ClassificationSums, SumAccumulator


def test_sum_accumulator_over_batches_ignores_padding():
    generator = np.random.default_rng(1)
    sums = SumAccumulator("test")
    expected = np.zeros(4)
    for _ in range(3):
        logits = generator.normal(size=(7, 9)).astype(np.float32)
        labels = generator.integers(0, 9, 7).astype(np.int32)
        losses = generator.random(7).astype(np.float32)
        weights = (generator.random(7) < 0.6).astype(np.float32)
        # Padding may hold any value.
        losses[weights == 0] = np.nan
        sums.add(
            tf.constant(losses), tf.constant(logits), tf.constant(labels), tf.constant(weights)
        )
        for i in np.flatnonzero(weights):
            ranked = np.argsort(-logits[i])
            expected += [np.float64(losses[i]), ranked[0] == labels[i], labels[i] in ranked[:5], 1]
    read = sums.read()
    np.testing.assert_allclose([read.loss, read.top1, read.top5, read.count], expected, rtol=1e-12)
    assert read.means("val")["val_top1"] == expected[1] / expected[3]


def test_sum_accumulator_of_two_classes_counts_all_as_top5():
    sums = SumAccumulator("test")
    sums.add(tf.zeros([2]), tf.constant([[1.0, 0.0], [1.0, 0.0]]), tf.constant([0, 1]))
    assert sums.read() == ClassificationSums(0.0, 1.0, 2.0, 2.0)


def test_sum_accumulator_restores_and_resets():
    sums = SumAccumulator("test")
    sums.restore(ClassificationSums(1.5, 2.0, 3.0, 4.0))
    assert sums.read() - ClassificationSums(0.5, 1.0, 1.0, 1.0) == ClassificationSums(
        1.0, 1.0, 2.0, 3.0
    )
    sums.reset()
    assert np.isnan(sums.read().means("train")["train_loss"])
