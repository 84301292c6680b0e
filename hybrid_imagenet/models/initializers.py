"""Initial weights: one Keras initializer per layer, each with a random stream of its own."""

from __future__ import annotations

import hashlib

import keras

from hybrid_imagenet.errors import UserError

CLASSIFIER_STDDEV = 0.01  # Goyal et al. §5.1; the other papers say nothing about the classifier


def layer_seed(seed: int, layer: str) -> int:
    """A 31-bit seed that depends on the run's seed and the layer's name only, not on the order of construction."""
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def convolution(kind: str, seed: int, layer: str) -> keras.initializers.Initializer:
    """The initializer of a convolution kernel (Lu et al. §2.2.3 and Table 3.5).

    `kaiming` is N(0, 2 / fan_in), not truncated (He et al. 2015); `xavier` is uniform with variance
    2 / (fan_in + fan_out) (Glorot and Bengio 2010); `gaussian` is N(0, 1) as Lu et al. print it.

    Raises:
      UserError: for another kind.
    """
    stream = layer_seed(seed, layer)
    if kind == "kaiming":
        return keras.initializers.VarianceScaling(2.0, "fan_in", "untruncated_normal", seed=stream)
    if kind == "xavier":
        return keras.initializers.GlorotUniform(seed=stream)
    if kind == "gaussian":
        return keras.initializers.RandomNormal(0.0, 1.0, seed=stream)
    raise UserError(f"--initializer={kind}: choose one of kaiming, xavier, gaussian")


def classifier(seed: int, layer: str) -> keras.initializers.Initializer:
    """The initializer of the last layer: N(0, 0.01^2) as in Goyal et al. §5.1."""
    return keras.initializers.RandomNormal(0.0, CLASSIFIER_STDDEV, seed=layer_seed(seed, layer))
