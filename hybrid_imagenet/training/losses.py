"""Computes the training loss, in float32."""

from __future__ import annotations

import tensorflow as tf


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Computes softmax cross-entropy with label smoothing (Szegedy et al.; Mikami et al. §2.1) without one-hot targets.

    With K classes, smoothing e and p = softmax(z):

        loss = -(1 - e) log p_y - (e / K) sum_k log p_k
             = (1 - e) CE(z, y) + e (logsumexp(z) - mean(z))

    Args:
      logits: float32 [b, K].
      labels: int32 [b].
      smoothing: e, in [0, 1].

    Returns:
      float32 [b].
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if smoothing:
        uniform = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return losses
