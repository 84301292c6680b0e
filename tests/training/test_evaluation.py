"""Validation: results for each image, on any number of ranks."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.training.accumulators import SumAccumulator
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.losses import binary_cross_entropy
from hybrid_imagenet.training.step import EvaluationStep
from tests.data import test_idx
from tests.references import short_reference


class RankWithoutSums(SingleProcess):
    """One of several ranks, which does not sum over the others."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank = rank
        self.size = size


class FirstPixel:
    """Predicts the parity of an image's first pixel.

    The probability grows with the pixel.
    """

    def __init__(self):
        self.sums = SumAccumulator("sums")

    def __call__(self, batch):
        self.sums.variable.assign_add([0.0, 0.0, 0.0, float(tf.reduce_sum(batch["weight"]))])
        pixel = tf.cast(batch["image"][:, 0, 0, 0], tf.float32)
        rows = tf.stack(
            [tf.cast(batch["label"] + 1, tf.float32), pixel % 2 + 1, pixel / 255], axis=1
        )
        return rows * batch["weight"][:, tf.newaxis]


@pytest.mark.parametrize(("size", "batch"), [(1, 5), (2, 5), (3, 2), (4, 8)])
def test_validation_on_any_number_of_ranks_has_one_result_per_image(tmp_path, size, batch):
    source = datasets.open_source("fashion_mnist", test_idx.write(tmp_path), "train")
    image_rows = np.zeros((12, 3), np.float32)
    for rank in range(size):
        validation = Validation(
            FirstPixel(),
            source,
            RankWithoutSums(rank, size),
            batch=batch,
            image_size=8,
            crop_fraction=1.0,
            options=HostOptions(readers=1, prefetch=1),
        )
        validation.run()
        image_rows += validation.image_rows
    validation.image_rows = image_rows
    pixels = test_idx.TRAIN[:, 0, 0]
    results = validation.image_results()
    np.testing.assert_array_equal(results["predicted"], pixels % 2)
    np.testing.assert_allclose(results["probability"], pixels / 255, rtol=1e-6)
    wrong = np.flatnonzero(results["label"] != pixels % 2)
    assert len(wrong) and sorted(results["worst"]) == sorted(wrong)
    assert (np.diff(results["probability"][results["worst"]]) <= 0).all()
    assert len(results["worst_files"]) == len(wrong)


@pytest.mark.parametrize("flip", [False, True])
def test_evaluation_step_with_flip_averages_scores_of_mirrored_images(flip):
    generator = np.random.default_rng(0)
    weights = generator.normal(0, 0.2, (4 * 5 * 3, 6)).astype(np.float32)
    images = generator.normal(size=(8, 4, 5, 3)).astype(np.float32)
    labels = generator.integers(0, 6, 8).astype(np.int32)

    def model(x, training):
        assert not training
        return tf.reshape(x, [8, -1]) @ weights

    step = EvaluationStep(model, lambda batch: batch["image"], loss=binary_cross_entropy, flip=flip)
    weights_of_images = np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32)
    batch = {
        "image": tf.constant(images),
        "label": tf.constant(labels),
        "weight": tf.constant(weights_of_images),
    }
    rows = step(batch).numpy()
    scores = images.reshape(8, -1) @ weights
    if flip:
        scores = (scores + images[:, :, ::-1].reshape(8, -1) @ weights) / 2
    assert not rows[7].any()
    scores = scores[:7]
    labels = labels[:7]
    rows = rows[:7]
    np.testing.assert_array_equal(rows[:, :2] - 1, np.stack([labels, scores.argmax(1)], axis=1))
    likelihood = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rows[:, 2], likelihood.max(axis=1), rtol=1e-5)
    means = step.sums.read().means("val")
    expected = short_reference.binary_cross_entropy(scores, labels, 0.0).mean()
    assert means["val_loss"] == pytest.approx(expected, rel=1e-4)
    assert means["val_top1"] == pytest.approx((scores.argmax(1) == labels).mean())
