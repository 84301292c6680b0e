"""Which images a validation got right, on any number of ranks."""

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


class EvenPixel:
    """Finds an image right whose first pixel is even."""

    def __init__(self):
        self.sums = SumAccumulator("sums")

    def __call__(self, batch):
        self.sums.variable.assign_add([0.0, 0.0, 0.0, float(tf.reduce_sum(batch["weight"]))])
        return batch["image"][:, 0, 0, 0] % 2 == 0


@pytest.mark.parametrize(("size", "batch"), [(1, 5), (2, 5), (3, 2), (4, 8)])
def test_each_image_has_its_own_place_on_any_number_of_ranks(tmp_path, size, batch):
    source = data.open_source("fashion_mnist", test_idx.write(tmp_path), "train")
    found = np.zeros(12, int)
    for rank in range(size):
        validation = Validation(
            EvenPixel(),
            source,
            OneOf(rank, size),
            batch=batch,
            image_size=8,
            crop_fraction=1.0,
            options=HostOptions(readers=1, prefetch=1),
            by_image=True,
        )
        assert validation.right is None
        validation.run()
        assert validation.right.dtype == bool
        found += validation.right
    np.testing.assert_array_equal(found, test_idx.TRAIN[:, 0, 0] % 2 == 0)


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
    right = step({"image": tf.constant(images), "label": tf.constant(labels), "weight": tf.ones(8)})
    scores = images.reshape(8, -1) @ weights
    if flip:
        scores = (scores + images[:, :, ::-1].reshape(8, -1) @ weights) / 2
    np.testing.assert_array_equal(right, scores.argmax(1) == labels)
    means = step.sums.read().means("val")
    expected = short_reference.binary_cross_entropy(scores, labels, 0.0).mean()
    assert means["val_loss"] == pytest.approx(expected, rel=1e-4)
    assert means["val_top1"] == pytest.approx((scores.argmax(1) == labels).mean())
