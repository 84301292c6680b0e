"""Tests MixUp and CutMix against Keras's layers, and how images are combined."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.data.image_mixing import (
    ImageMixer,
    MixedLabels,
    beta,
    cutmix,
    cutmix_share,
    mixup,
    random_boxes,
)
from hybrid_imagenet.order import sampling
from hybrid_imagenet.training.losses import LOSSES, mixed_loss

SIDE = 9
CLASSES = 5


def images_of(count):
    random = np.random.default_rng(0)
    return tf.constant(random.normal(size=(count, SIDE, SIDE, 3)), tf.float32)


def seeds_of(count, first=0):
    examples = np.arange(first, first + count, dtype=np.int64)
    return tf.constant(sampling.seeds(3, np.zeros(count, np.int64), examples))


def one_hot(labels):
    return tf.one_hot(labels, CLASSES)


def targets(labels):
    """Returns the targets that Keras would train with, float32 [b, CLASSES]."""
    share = labels.share[:, None]
    return share * one_hot(labels.own) + (1 - share) * one_hot(labels.partner)


def test_mixup_images_and_labels_equal_those_of_keras():
    images = images_of(6)
    labels = tf.constant([0, 1, 2, 3, 4, 0])
    order = [5, 0, 1, 2, 3, 4]
    share = tf.constant([0.0, 0.1, 0.5, 0.7, 0.99, 1.0])
    layer = keras.layers.MixUp()
    transformation = {"mix_weight": share, "permutation_order": tf.constant(order)}
    np.testing.assert_allclose(
        mixup(images, tf.gather(images, order), share),
        layer.transform_images(images, transformation),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        targets(MixedLabels(labels, tf.gather(labels, order), share)),
        layer.transform_labels(one_hot(labels), transformation),
        rtol=1e-6,
    )


def test_cutmix_images_and_labels_equal_those_of_keras():
    images = images_of(4)
    labels = tf.constant([0, 1, 2, 3])
    order = [3, 0, 1, 2]
    # The boxes cover nothing, a part, a rectangle with one row too many, and the whole image.
    boxes = np.array([[2, 2, 2, 2], [1, 2, 5, 6], [0, 3, 1, 9], [0, 0, SIDE, SIDE]], np.float32)
    layer = keras.layers.CutMix()
    top, left, bottom, right = boxes.T
    masks, weight = layer._generate_batch_mask(images.shape, (left, right, top, bottom))
    transformation = {
        "batch_masks": masks,
        "mix_weight": weight,
        "permutation_order": tf.constant(order),
    }
    np.testing.assert_array_equal(
        cutmix(images, tf.gather(images, order), tf.constant(boxes)),
        layer.transform_images(images, transformation),
    )
    share = cutmix_share(tf.constant(boxes), SIDE)
    np.testing.assert_allclose(
        targets(MixedLabels(labels, tf.gather(labels, order), share)),
        layer.transform_labels(one_hot(labels), transformation),
        rtol=1e-6,
    )


def test_random_boxes_are_inside_the_image_and_have_the_share_up_to_whole_pixels():
    random = np.random.default_rng(0)
    share, top, left = tf.constant(random.uniform(size=(3, 5000)), tf.float32)
    boxes = random_boxes(share, top, left, SIDE).numpy()
    assert (boxes == boxes.round()).all()
    assert boxes.min() == 0
    assert boxes.max() == SIDE
    sizes = boxes[:, 2:] - boxes[:, :2]
    np.testing.assert_array_equal(sizes[:, 0], sizes[:, 1])
    np.testing.assert_allclose(sizes[:, 0], SIDE * np.sqrt(1 - share), atol=0.5001)
    # A box of 4 pixels occurs about equally often at every position.
    first = boxes[sizes[:, 0] == 4][:, :2]
    counts = np.bincount(first.astype(int).ravel(), minlength=SIDE - 3)
    assert counts.max() < 1.5 * counts.min()


UNIFORM = np.linspace(0, 1, 10_001, endpoint=False)


@pytest.mark.parametrize(
    ("alpha", "quantile", "tolerance"),
    [
        (1.0, UNIFORM, 1e-6),
        # The arcsine law.
        (0.5, np.sin(np.pi * UNIFORM / 2) ** 2, 1e-6),
        # The root of 3 x^2 - 2 x^3 = u; the quantile rises vertically at 0.
        (2.0, 0.5 - np.sin(np.arcsin(1 - 2 * UNIFORM) / 3), 3e-3),
    ],
)
def test_beta_quantiles_equal_those_in_closed_form(alpha, quantile, tolerance):
    values = beta(tf.constant(UNIFORM, tf.float32), alpha).numpy()
    np.testing.assert_allclose(values, quantile, atol=tolerance)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 4.0])
def test_beta_of_uniform_numbers_has_the_moments_of_the_distribution(alpha):
    values = beta(tf.constant(UNIFORM, tf.float32), alpha).numpy().astype(np.float64)
    assert values.min() >= 0
    assert values.max() <= 1
    assert values.mean() == pytest.approx(0.5, abs=1e-4)
    assert values.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)


ALL = {
    "mixup": ImageMixer(mixup_alpha=0.4),
    "cutmix": ImageMixer(cutmix_alpha=1.0),
    "both": ImageMixer(mixup_alpha=0.4, cutmix_alpha=1.0),
}


@pytest.mark.parametrize("name", ALL)
def test_mixer_labels_have_the_shares_of_the_images(name):
    # Each image has one value, so the mean of a mixed image shows the shares.
    count = 64
    values = np.arange(count, dtype=np.float32)
    images = tf.constant(np.broadcast_to(values[:, None, None, None], (count, SIDE, SIDE, 3)))
    seeds = seeds_of(count)
    mixed = ALL[name].images(images, seeds)
    labels = ALL[name].labels(tf.range(count, dtype=tf.int64), seeds, SIDE)
    assert labels.own.numpy().tolist() == list(range(count))
    assert labels.partner.numpy().tolist() == [count - 1, *range(count - 1)]
    share = labels.share.numpy()
    expected = share * values + (1 - share) * np.roll(values, 1)
    np.testing.assert_allclose(tf.reduce_mean(mixed, [1, 2, 3]), expected, rtol=1e-4, atol=1e-4)
    assert 0 <= share.min() < 0.2
    assert 0.8 < share.max() <= 1
    larger = labels.larger().numpy()
    np.testing.assert_array_equal(larger, np.where(share >= 0.5, labels.own, labels.partner))


def test_mixer_with_both_methods_mixes_each_image_by_one_of_them():
    seeds = seeds_of(400)
    images = images_of(400)
    whole = ALL["both"].images(images, seeds).numpy()
    blended = ALL["mixup"].images(images, seeds).numpy()
    cut = ALL["cutmix"].images(images, seeds).numpy()
    is_blended = (whole == blended).all(axis=(1, 2, 3))
    is_cut = (whole == cut).all(axis=(1, 2, 3))
    assert (is_blended | is_cut).all()
    assert 160 < is_cut.sum() < 240


def test_mixer_shares_follow_the_seed_of_the_image_alone():
    labels = tf.range(8, dtype=tf.int64)
    whole = ALL["both"].labels(labels, seeds_of(8), SIDE).share.numpy()
    part = ALL["both"].labels(labels[:3], seeds_of(3, first=4), SIDE).share.numpy()
    np.testing.assert_array_equal(part, whole[4:7])
    assert len(set(whole)) > 4


def test_mixer_of_two_virtual_gpus_mixes_like_two_gpus():
    images = images_of(10)
    seeds = seeds_of(10)
    combined = ImageMixer(0.4, 1.0, parts=2).images(images, seeds)
    separate = [ALL["both"].images(images[k : k + 5], seeds[k : k + 5]) for k in (0, 5)]
    np.testing.assert_array_equal(combined, tf.concat(separate, 0))


def test_mixer_compiled_by_xla_mixes_like_one_without_xla():
    images = images_of(16)
    labels = tf.range(16, dtype=tf.int64)
    seeds = seeds_of(16)

    def mix(images, labels, seeds):
        mixer = ALL["both"]
        return mixer.images(images, seeds), mixer.labels(labels, seeds, SIDE)

    compiled = tf.function(mix, autograph=False, jit_compile=True)(images, labels, seeds)
    for value, expected in zip(
        tf.nest.flatten(compiled), tf.nest.flatten(mix(images, labels, seeds)), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def softmax_of_targets(logits, q):
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -(q * log_p).sum(axis=1)


def sigmoid_of_targets(logits, q):
    p = 1 / (1 + np.exp(-logits))
    return -(q * np.log(p) + (1 - q) * np.log(1 - p)).sum(axis=1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "definition"), [("softmax", softmax_of_targets), ("sigmoid", sigmoid_of_targets)]
)
def test_mixed_loss_equals_that_of_soft_targets(loss, definition, smoothing):
    logits = np.random.default_rng(0).normal(size=(4, CLASSES))
    # The third image has the label of its partner.
    labels = MixedLabels(
        tf.constant([0, 1, 2, 3]), tf.constant([4, 0, 2, 1]), tf.constant([0.3, 1.0, 0.5, 0.0])
    )
    q = (1 - smoothing) * targets(labels).numpy().astype(np.float64) + smoothing / CLASSES
    losses = mixed_loss(LOSSES[loss], tf.constant(logits, tf.float32), labels, smoothing)
    np.testing.assert_allclose(losses, definition(logits, q), rtol=2e-6)
