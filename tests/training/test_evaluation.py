"""What a validation finds for each image, on any number of ranks."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import data
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.training.accumulators import SumAccumulator
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.losses import binary_cross_entropy
from hybrid_imagenet.training.step import EvaluationStep
from tests.data import test_idx
from tests.references import short_reference


class OneOf(SingleProcess):
    """A rank among several; sums stay its own."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


class FirstPixel:
    """Takes the parity of an image's first pixel for its class, with a probability that grows with
    the pixel.
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
def test_each_image_has_its_own_place_on_any_number_of_ranks(tmp_path, size, batch):
    source = data.open_source("fashion_mnist", test_idx.write(tmp_path), "train")
    found = np.zeros((12, 3), np.float32)
    for rank in range(size):
        validation = Validation(
            FirstPixel(),
            source,
            OneOf(rank, size),
            batch=batch,
            image_size=8,
            crop_fraction=1.0,
            options=HostOptions(readers=1, prefetch=1),
        )
        validation.run()
        found += validation.image_rows
    validation.image_rows = found
    pixels, results = test_idx.TRAIN[:, 0, 0], validation.image_results()
    np.testing.assert_array_equal(results["predicted"], pixels % 2)
    np.testing.assert_allclose(results["probability"], pixels / 255, rtol=1e-6)
    wrong = np.flatnonzero(results["label"] != pixels % 2)
    assert len(wrong) and sorted(results["worst"]) == sorted(wrong)
    assert (np.diff(results["probability"][results["worst"]]) <= 0).all()
    assert len(results["worst_files"]) == len(wrong)


@pytest.mark.parametrize("flip", [False, True])
def test_scores_of_mirrored_images_are_averaged_in(flip):
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
    found = step(batch).numpy()
    scores = images.reshape(8, -1) @ weights
    if flip:
        scores = (scores + images[:, :, ::-1].reshape(8, -1) @ weights) / 2
    assert not found[7].any()
    scores, labels, found = scores[:7], labels[:7], found[:7]
    np.testing.assert_array_equal(found[:, :2] - 1, np.stack([labels, scores.argmax(1)], axis=1))
    likelihood = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, 2], likelihood.max(axis=1), rtol=1e-5)
    means = step.sums.read().means("val")
    expected = short_reference.binary_cross_entropy(scores, labels, 0.0).mean()
    assert means["val_loss"] == pytest.approx(expected, rel=1e-4)
    assert means["val_top1"] == pytest.approx((scores.argmax(1) == labels).mean())
