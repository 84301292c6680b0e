import numpy as np
import tensorflow as tf

from hybrid_imagenet.training.mixup import mirrored, mix


def test_images_are_mixed_with_the_mirrored_ones():
    images = np.random.default_rng(0).normal(size=(5, 4, 4, 3)).astype(np.float32)
    seeds = tf.constant([[7, 9]] * 5, tf.int64)
    mixed, share = mix(tf.constant(images), seeds, 0.2)
    assert share.shape == (5,)
    share = float(share[0])
    assert 0 <= share <= 1
    np.testing.assert_allclose(mixed, share * images + (1 - share) * images[::-1], rtol=1e-5, atol=1e-6)
    again, _ = mix(tf.constant(images), seeds, 0.2)
    np.testing.assert_array_equal(mixed, again)


def test_each_part_is_mixed_as_a_batch_of_its_own():
    images = tf.constant(np.random.default_rng(0).normal(size=(6, 4, 4, 3)).astype(np.float32))
    seeds = tf.constant([[n, 9] for n in range(6)], tf.int64)
    mixed, shares = mix(images, seeds, 0.2, parts=2)
    for part in (slice(0, 3), slice(3, 6)):
        own, share = mix(images[part], seeds[part], 0.2)
        np.testing.assert_array_equal(mixed[part], own)
        np.testing.assert_array_equal(shares[part], share)
    assert shares[0] != shares[3]
    np.testing.assert_array_equal(mirrored(tf.range(6), 2), [2, 1, 0, 5, 4, 3])


def test_the_share_has_the_moments_of_the_beta_distribution():
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    image = tf.zeros([1, 1, 1, 1])
    for alpha in (0.2, 1.0):
        share = tf.function(lambda seed, alpha=alpha: mix(image, tf.stack([[seed, 1]]), alpha)[1][0], autograph=False)
        shares = [float(share(tf.constant(seed, tf.int64))) for seed in range(1500)]
        assert abs(np.mean(shares) - 0.5) < 0.04
        assert abs(np.var(shares) * 4 * (2 * alpha + 1) - 1) < 0.12
