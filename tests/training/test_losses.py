"""Losses."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.training.losses import binary_cross_entropy, cross_entropy, initial_bias
from tests.references import short_reference


def reference(logits, labels, smoothing):
    """Returns the cross-entropy with smoothed labels in float64.

    Reference: Szegedy et al. 2016, section 7, with q'(k) = (1 - e) [k = y] + e / K.
    """
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    q = np.full_like(log_p, smoothing / logits.shape[1])
    q[np.arange(len(labels)), labels] += 1 - smoothing
    return -(q * log_p).sum(axis=1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("loss", "definition", "atol"),
    [
        (cross_entropy, reference, 0.0),
        (binary_cross_entropy, short_reference.binary_cross_entropy, 1e-6),
    ],
)
def test_loss_with_smoothing_equals_its_definition(loss, definition, atol, smoothing):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(6, 10)).astype(np.float32) * 4
    labels = generator.integers(0, 10, 6).astype(np.int32)
    ours = loss(tf.constant(logits), tf.constant(labels), smoothing).numpy()
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, definition(logits, labels, smoothing), rtol=2e-6, atol=atol)


def test_loss_of_large_logits_is_finite():
    logits = tf.constant([[1e4, -1e4, 0.0]])
    assert np.isfinite(cross_entropy(logits, tf.constant([1]), 0.1).numpy()).all()
    assert np.isfinite(binary_cross_entropy(logits, tf.constant([1]), 0.1).numpy()).all()


def test_initial_bias_of_sigmoid_makes_the_first_loss_small():
    assert initial_bias("softmax", 1000) == 0.0
    logits = tf.fill([1, 1000], initial_bias("sigmoid", 1000))
    loss = float(binary_cross_entropy(logits, tf.constant([3]))[0])
    assert loss == pytest.approx(1000 * np.log1p(1 / 1000) + np.log(1000), rel=1e-5)
