"""Lists the convolutions of a ResNet with their normalizations, by their names here, in torchvision and in Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from hybrid_imagenet.numerics.depths import BASIC, DEPTHS

Weights = Mapping[str, np.ndarray]
NORM_VARIABLES = ("gamma", "beta", "moving_mean", "moving_variance")
CLASSIFIER = "logits"


@dataclasses.dataclass(frozen=True)
class Unit:
    """One convolution and its normalization.

    Attributes:
      here: the layers' common prefix; they are `<here>_conv` and `<here>_bn`.
      torchvision: the modules of convolution and normalization.
      applications: the prefix in keras.applications, used like `here`.
    """

    here: str
    torchvision: tuple[str, str]
    applications: str


def units(model: str) -> list[Unit]:
    """The convolutions of a ResNet, from the input to the output, a block's shortcut before its own."""
    found = [Unit("stem", ("conv1", "bn1"), "conv1")]
    convolutions = 2 if model in BASIC else 3
    for stage, count in enumerate(DEPTHS[model], start=1):
        for block in range(1, count + 1):
            here = f"stage{stage}_block{block}"
            there = f"layer{stage}.{block - 1}"
            keras_name = f"conv{stage + 1}_block{block}"
            if block == 1 and (stage > 1 or model not in BASIC):
                shortcut = (f"{there}.downsample.0", f"{there}.downsample.1")
                found.append(Unit(f"{here}_shortcut", shortcut, f"{keras_name}_0"))
            for number in range(1, convolutions + 1):
                names = (f"{there}.conv{number}", f"{there}.bn{number}")
                found.append(Unit(f"{here}_{number}", names, f"{keras_name}_{number}"))
    return found


def with_epsilon(weights: Weights, old: float, new: float) -> dict[str, np.ndarray]:
    """The weights for normalizations that add `new` instead of `old` to the variance: it takes up the difference.

    A variance may then be slightly negative; the sum of both is what it was.
    """
    shift = np.float64(old) - np.float64(new)
    return {
        name: (value + shift).astype(np.float32) if shift and name.endswith("/moving_variance") else np.asarray(value)
        for name, value in weights.items()
    }
