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
    """Computes softmax cross-entropy with label smoothing (Szegedy et al.; Mikami et al. §2.1)
    without one-hot targets.

    With K classes, smoothing e and p = softmax(z):

        loss = -(1 - e) log p_y - (e / K) sum_k log p_k
             = (1 - e) CE(z, y) + e (logsumexp(z) - mean(z))

    Args:
      logits: float32 [b, K].
      labels: int64 [b].
      smoothing: e, in [0, 1].

    Returns:
      float32 [b].
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if smoothing:
        uniform = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    return losses


def binary_cross_entropy(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
    """Computes the cross-entropy of every class by itself, without one-hot targets (Beyer et al.,
    arXiv 2006.07159, 5; Wightman et al., arXiv 2110.00476, 3.1), summed over classes.

    With K classes, smoothing e, targets q_k = (1 - e) [k = y] + e / K and p_k = 1 / (1 +
    exp(-z_k)):

        loss = -sum_k (q_k log p_k + (1 - q_k) log(1 - p_k))
             = sum_k softplus(z_k) - (1 - e) z_y - (e / K) sum_k z_k

    A network that begins with scores of -ln K (`initial_bias`) begins with a loss of some 1 + ln K;
    with scores of 0 it would be K ln 2, nearly all of it for classes that an image is not of.
    Shapes are those of `cross_entropy`.
    """
    # Of gathering them the gradient needs an integer, which a GPU would hand to its host.
    true = tf.reduce_sum(
        tf.where(labels[:, None] == np.arange(logits.shape[-1]), logits, 0.0), axis=-1
    )
    losses = tf.reduce_sum(tf.nn.softplus(logits), axis=-1) - (1.0 - smoothing) * true
    return losses - smoothing * tf.reduce_mean(logits, axis=-1) if smoothing else losses


def mixed_loss(
    loss: Loss, logits: tf.Tensor, labels: MixedLabels, smoothing: float = 0.0
) -> tf.Tensor:
    """Computes the loss of mixed images, float32 [b].

    Both losses are linear in the targets. So the loss of targets that are shared between two labels
    is the mean of the losses of the two, weighted by share, also with label smoothing.
    """
    own = loss(logits, labels.own, smoothing)
    partner = loss(logits, labels.partner, smoothing)
    return labels.share * own + (1.0 - labels.share) * partner


def weighted_loss(loss: Loss, class_weights: npt.NDArray[np.float32]) -> Loss:
    """Returns a loss that multiplies that of each image by the weight of its class.

    The mean over a batch is still divided by its number of images, as in Keras.

    Args:
      loss: the unweighted loss.
      class_weights: float32 [classes].
    """

    def weighted(logits: tf.Tensor, labels: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        return tf.gather(class_weights, labels) * loss(logits, labels, smoothing)

    return weighted


LOSSES: dict[str, Loss] = {"softmax": cross_entropy, "sigmoid": binary_cross_entropy}
"""The values of --loss."""


def initial_bias(loss: str, classes: int) -> float:
    """Returns the score of every class at which a network should begin: for `binary`, that of one
    class in K.
    """
    return -math.log(classes) if loss == "sigmoid" else 0.0
