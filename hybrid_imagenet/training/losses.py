"""Computes the training loss, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.data.image_mixing import MixedLabels

Loss = Callable[[tf.Tensor, tf.Tensor, float], tf.Tensor]


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Computes softmax cross-entropy with label smoothing, without one-hot targets.

    With K classes, smoothing e, logits z, label y and p = softmax(z):

        loss = -(1 - e) log p_y - (e / K) sum_k log p_k
             = (1 - e) CE(z, y) + e (logsumexp(z) - mean(z))

    Args:
      logits: float32 [b, K].
      labels: int64 [b].
      smoothing: Smoothing e, in [0, 1].

    Returns:
      float32 [b].

    Reference:
      Szegedy et al., arXiv 1512.00567, 7; Mikami et al. §2.1.
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if smoothing:
        uniform = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return losses


def binary_cross_entropy(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Computes the sum of the binary cross-entropies of all classes, without one-hot targets.

    With K classes, smoothing e, logits z, label y, targets q_k = (1 - e) [k = y] + e / K and
    p_k = 1 / (1 + exp(-z_k)):

        loss = -sum_k (q_k log p_k + (1 - q_k) log(1 - p_k))
             = sum_k softplus(z_k) - (1 - e) z_y - (e / K) sum_k z_k

    A network whose first logits are -ln K (`initial_bias`) begins with a loss of about 1 + ln K.
    With logits of 0 it would be K ln 2, nearly all of it from the K - 1 wrong classes.

    Args:
      logits: float32 [b, K].
      labels: int64 [b].
      smoothing: Smoothing e, in [0, 1].

    Returns:
      float32 [b].

    Reference:
      Beyer et al., arXiv 2006.07159, 5; Wightman et al., arXiv 2110.00476, 3.1.
    """
    # The gradient of tf.gather would need an integer that a GPU has to fetch from its host.
    is_label = labels[:, None] == np.arange(logits.shape[-1])
    label_logits = tf.reduce_sum(tf.where(is_label, logits, 0.0), axis=-1)
    losses = tf.reduce_sum(tf.nn.softplus(logits), axis=-1) - (1.0 - smoothing) * label_logits
    if smoothing:
        losses -= smoothing * tf.reduce_mean(logits, axis=-1)
    return losses


def mixed_loss(
    loss: Loss, logits: tf.Tensor, labels: MixedLabels, smoothing: float = 0.0
) -> tf.Tensor:
    """Computes the loss of mixed images, float32 [b].

    Both losses are linear in the targets. So the loss of targets that are shared between two labels
    is the mean of the losses of the two labels, weighted by share, even with label smoothing.
    """
    image_losses = loss(logits, labels.own, smoothing)
    partner_losses = loss(logits, labels.partner, smoothing)
    return labels.share * image_losses + (1.0 - labels.share) * partner_losses


def weighted_loss(loss: Loss, class_weights: npt.NDArray[np.float32]) -> Loss:
    """Returns a loss function that multiplies the loss of each image by its class's weight.

    The mean over a batch is still the sum divided by the number of images, as in Keras.

    Args:
      loss: The unweighted loss.
      class_weights: float32 [classes].
    """

    def weighted(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        return tf.gather(class_weights, labels) * loss(logits, labels, smoothing)

    return weighted


LOSSES: dict[str, Loss] = {"softmax": cross_entropy, "sigmoid": binary_cross_entropy}
"""Loss functions by their value of --loss."""


def initial_bias(loss: str, classes: int) -> float:
    """Returns the bias with which the last layer should begin.

    For `sigmoid` it gives each of K classes a probability of about 1 / K.

    Args:
      loss: A key of `LOSSES`.
      classes: K.
    """
    return -math.log(classes) if loss == "sigmoid" else 0.0
