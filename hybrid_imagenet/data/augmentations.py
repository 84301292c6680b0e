"""Computes crop windows in NumPy, from image sizes and uniform random numbers.

A window is int64 (y, x, height, width) in pixels of the stored image; `[k, 4]` for k images. The
output of the host's part of an augmentation is a window resized to a square.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]  # [k, 2]: height, width
Windows = npt.NDArray[np.int64]  # [k, 4]: y, x, height, width
Uniforms = npt.NDArray[np.float32]  # [k, n] in [0, 1)

AUGMENTATIONS = ("none", "alexnet", "inception", "sony", "digits", "shift")
WHOLE = (
    "digits",
    "shift",
)  # of these the host hands over whole images, and whole images are evaluated
EVALUATION_FRACTION = 0.875  # 224 of 256

INCEPTION_TRIES = 10
INCEPTION_AREA = (0.08, 1.0)
INCEPTION_ASPECT = (3 / 4, 4 / 3)

# AlexNet's color noise (Krizhevsky et al., 4.1) for pixels in [0, 1]: the principal components of
# ImageNet's colors as columns, and their deviations.
PCA_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
PCA_VALUES = (0.2175, 0.0188, 0.0045)
PCA_DEVIATION = 0.1


@dataclasses.dataclass(frozen=True)
class SonyRanges:
    """The augmentation of Mikami et al.: random ranges as in the published ImageNet example of
    their library.

    Scale and aspect are log-uniform, rotation is uniform, distortion is exp(uniform) - 1, contrast
    is log-uniform per channel about 0.5. Padding (black pixels on each side of the stored image),
    brightness (uniform, one draw per image) and noise (normal, its deviation uniform up to the
    bound) are off there.
    """

    stored: int = 320  # pixels, for an output of 224
    scale: tuple[float, float] = (0.77, 1.54)
    rotation: float = 0.5  # radians, either way
    aspect: float = 1.3
    distortion: float = 0.2
    contrast: float = 1.1
    pad: int = 0  # pixels, for a stored image of `stored`
    brightness: float = 0.0
    noise: float = 0.0


SONY = SonyRanges(pad=8, brightness=0.05, noise=0.02)
"""Padding, brightness and noise are used "in all our experiments" without values (§3.2): these are
ours.
"""

# The host's draws of an image come from stream 0 of its seeds, the device's from this one on.
DEVICE_STREAM = 64


@dataclasses.dataclass(frozen=True)
class HostStage:
    """The host's part of an augmentation: how many uniform numbers it takes and the side it hands
    over.
    """

    draws: int
    side: int


def host_stage(augmentation: str, image_size: int) -> HostStage:
    """Returns the host's part of an augmentation with network inputs of `image_size`.

    The Sony augmentation rotates and scales on the device, from a square of 320 pixels for an input
    of 224 (`input_side` is the way back).
    """
    if augmentation == "sony":
        return HostStage(0, round(image_size * SONY.stored / 224))
    draws = {"alexnet": 2, "inception": 4 * INCEPTION_TRIES}.get(augmentation, 0)
    return HostStage(draws, image_size)


def input_side(augmentation: str, side: int) -> int:
    """The side of the network's input for what the host hands over."""
    return round(side * 224 / SONY.stored) if augmentation == "sony" else side


def evaluation_fraction(augmentation: str) -> float:
    """The part of the shorter side that is evaluated, unless told otherwise: small images are
    filled to the edge.
    """
    return 1.0 if augmentation in WHOLE else EVALUATION_FRACTION


def windows(augmentation: str, sizes: Sizes, uniform: Uniforms) -> Windows:
    """The training window of each image (uniform: [k, host_stage(...).draws])."""
    if augmentation == "alexnet":
        return alexnet(sizes, uniform)
    if augmentation == "inception":
        return inception(sizes, uniform)
    if augmentation == "sony":
        return center(sizes, 1.0)
    if augmentation in WHOLE:
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    return center(sizes, EVALUATION_FRACTION)


def center(sizes: Sizes, fraction: float) -> Windows:
    """The central square whose side is `fraction` of the shorter side.

    With fraction 224/256 and a resize to 224 this is the usual resize to 256 and central crop of
    224, in one step.
    """
    side = np.maximum(1, np.rint(sizes.min(axis=1) * fraction)).astype(np.int64)
    corner = (sizes - side[:, None]) // 2
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1)


def alexnet(sizes: Sizes, uniform: Uniforms) -> Windows:
    """A square of 224/256 of the shorter side at a random place (Krizhevsky et al., 4.1).

    The same as resizing the shorter side to 256 and cropping 224, but only the cropped part is
    decoded and resized. uniform: [k, 2].
    """
    side = np.maximum(1, np.rint(sizes.min(axis=1) * EVALUATION_FRACTION)).astype(np.int64)
    corner = np.floor(uniform.astype(np.float64) * (sizes - side[:, None] + 1)).astype(np.int64)
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1)


def inception(sizes: Sizes, uniform: Uniforms) -> Windows:
    """A window of 8 to 100 % of the area and aspect ratio 3/4 to 4/3 at a random place (Szegedy et
    al.).

    Area is uniform, the logarithm of the ratio too. The first of 10 tries that fits is taken; if
    none does, the largest central window whose ratio is within the bounds. uniform: [k, 40].
    """
    draws = uniform.astype(np.float64).reshape(len(sizes), INCEPTION_TRIES, 4)
    size = sizes[:, None, :].astype(np.float64)
    low, high = INCEPTION_AREA
    area = size[..., 0] * size[..., 1] * (low + (high - low) * draws[..., 0])
    start, stop = (math.log(bound) for bound in INCEPTION_ASPECT)
    aspect = np.exp(start + (stop - start) * draws[..., 1])
    extent = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=-1)))
    fits = np.all((extent >= 1) & (extent <= size), axis=-1)
    choice = np.argmax(fits, axis=1)
    rows = np.arange(len(sizes))
    extent = extent[rows, choice]
    corner = np.floor(draws[rows, choice, 2:] * (sizes - extent + 1))
    tried = np.concatenate([corner, extent], axis=1).astype(np.int64)
    return np.where(np.any(fits, axis=1)[:, None], tried, _widest(sizes))


def _widest(sizes: Sizes) -> Windows:
    """The largest central window whose aspect ratio lies within the bounds."""
    height, width = sizes[:, 0], sizes[:, 1]
    low, high = INCEPTION_ASPECT
    extent = np.stack(
        [np.minimum(height, np.rint(width / low)), np.minimum(width, np.rint(height * high))],
        axis=1,
    ).astype(np.int64)
    extent = np.maximum(extent, 1)
    return np.concatenate([(sizes - extent) // 2, extent], axis=1)


def decode_ratio(window: Windows, side: int) -> npt.NDArray[np.int64]:
    """The reduction (1, 2, 4 or 8) at which an image is decoded: the window keeps at least `side`
    pixels each way.

    The decoder averages blocks of pixels then, without which a resize to `side` would alias.
    """
    shortest = window[:, 2:].min(axis=1)
    ratios = np.ones(len(window), np.int64)
    for ratio in (2, 4, 8):
        ratios[shortest >= ratio * side] = ratio
    return ratios
