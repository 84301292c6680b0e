"""Computes crop windows in NumPy, from image sizes and uniform random numbers.

A window is int64 (y, x, height, width) in pixels of the stored image, [k, 4] for k images. The
host's part of an augmentation resizes a window to a square.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]
"""Height and width of images, [k, 2]."""
Windows = npt.NDArray[np.int64]
"""y, x, height and width of windows, [k, 4]."""
Uniforms = npt.NDArray[np.float32]
"""Uniform random numbers in [0, 1), [k, n]."""

AUGMENTATIONS = ("none", "alexnet", "inception", "flash", "digits", "shift")
WHOLE_IMAGE_AUGMENTATIONS = ("digits", "shift")
"""With these, the host decodes whole images for training, and whole images are evaluated."""
EVALUATION_FRACTION = 224 / 256
"""Side of the square that is evaluated by default, as a fraction of the shorter side."""

# Szegedy et al.: number of tries, and ranges of the fraction of the area and of the aspect ratio.
INCEPTION_TRIES = 10
INCEPTION_AREA = (0.08, 1.0)
INCEPTION_ASPECT = (3 / 4, 4 / 3)

# AlexNet's color noise (Krizhevsky et al., section 4.1) for pixels in [0, 1]: the principal
# components of ImageNet's colors as columns, their standard deviations, and the standard deviation
# of the noise relative to these.
PCA_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
PCA_VALUES = (0.2175, 0.0188, 0.0045)
PCA_DEVIATION = 0.1


@dataclasses.dataclass(frozen=True)
class FlashRanges:
    """Sets the random ranges of the augmentation of Mikami et al.

    The defaults are those of the published ImageNet example of the authors' library, where padding,
    brightness and noise are off.

    Attributes:
      stored: Side of the stored image in pixels, for an output of 224.
      scale: Range of the scale, which is log-uniform.
      rotation: Bound of the rotation in radians, which is uniform in both directions.
      aspect: Bound of the aspect ratio, which is log-uniform.
      distortion: Bound of the exponent u of the lens distortion exp(u) - 1; u is uniform.
      contrast: Bound of the contrast about 0.5, which is log-uniform, one draw per channel.
      pad: Black pixels on each side of a stored image of `stored` pixels.
      brightness: Bound of the brightness offset, which is uniform, one draw per image.
      noise: Bound of the noise's standard deviation, which is uniform; the noise is normal.
    """

    stored: int = 320
    scale: tuple[float, float] = (0.77, 1.54)
    rotation: float = 0.5
    aspect: float = 1.3
    distortion: float = 0.2
    contrast: float = 1.1
    pad: int = 0
    brightness: float = 0.0
    noise: float = 0.0


# The paper uses padding, brightness and noise "in all our experiments" but gives no values (section
# 3.2), so these values are our choice.
FLASH = FlashRanges(pad=8, brightness=0.05, noise=0.02)

# Of an image's random numbers, the host uses those from number 0 on, and the device those from this
# number on. The host needs at most 40.
DEVICE_STREAM = 64


@dataclasses.dataclass(frozen=True)
class HostAugmentation:
    """Describes the host's part of an augmentation.

    Attributes:
      num_draws: Number of uniform random numbers that it needs for each image.
      side: Pixels of the square images that it returns.
    """

    num_draws: int
    side: int


def host_augmentation(augmentation: str, image_size: int) -> HostAugmentation:
    """Returns the host's part of an augmentation.

    The augmentation `flash` rotates and scales on the device, which needs a square of 320 pixels
    for an input of 224. `input_side` is the inverse.

    Args:
      augmentation: One of `AUGMENTATIONS`.
      image_size: Pixels of the network's input.
    """
    if augmentation == "flash":
        return HostAugmentation(0, round(image_size * FLASH.stored / 224))
    num_draws = {"alexnet": 2, "inception": 4 * INCEPTION_TRIES}.get(augmentation, 0)
    return HostAugmentation(num_draws, image_size)


def input_side(augmentation: str, side: int) -> int:
    """Returns the side of the network's input for host images of `side` pixels."""
    return round(side * 224 / FLASH.stored) if augmentation == "flash" else side


def evaluation_fraction(augmentation: str) -> float:
    """Returns the fraction of the shorter side that is evaluated by default.

    It is 1 for the augmentations of small images, because their content reaches to the edge.
    """
    return 1.0 if augmentation in WHOLE_IMAGE_AUGMENTATIONS else EVALUATION_FRACTION


def training_windows(augmentation: str, sizes: Sizes, uniform: Uniforms) -> Windows:
    """Returns the training window of each image.

    Args:
      augmentation: One of `AUGMENTATIONS`.
      sizes: Sizes of the images, [k, 2].
      uniform: Random numbers, [k, host_augmentation(...).num_draws].
    """
    if augmentation == "alexnet":
        return alexnet_windows(sizes, uniform)
    if augmentation == "inception":
        return inception_windows(sizes, uniform)
    if augmentation == "flash":
        return center_windows(sizes, 1.0)
    if augmentation in WHOLE_IMAGE_AUGMENTATIONS:
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    return center_windows(sizes, EVALUATION_FRACTION)


def center_windows(sizes: Sizes, fraction: float) -> Windows:
    """Returns the central square of each image.

    With fraction 224/256 and a resize to 224 it is the usual resize to 256 and central crop of 224,
    in one step.

    Args:
      sizes: Sizes of the images, [k, 2].
      fraction: Side of the square as a fraction of the shorter side.
    """
    side = np.maximum(1, np.rint(sizes.min(axis=1) * fraction)).astype(np.int64)
    corner = (sizes - side[:, None]) // 2
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1)


def alexnet_windows(sizes: Sizes, uniform: Uniforms) -> Windows:
    """Returns a square of 224/256 of the shorter side at a random position.

    This is equal to a resize of the shorter side to 256 and a crop of 224, but only the cropped
    part is decoded and resized.

    Args:
      sizes: Sizes of the images, [k, 2].
      uniform: Random numbers, [k, 2].

    Reference: Krizhevsky et al., section 4.1.
    """
    side = np.maximum(1, np.rint(sizes.min(axis=1) * EVALUATION_FRACTION)).astype(np.int64)
    corner = np.floor(uniform.astype(np.float64) * (sizes - side[:, None] + 1)).astype(np.int64)
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1)


def inception_windows(sizes: Sizes, uniform: Uniforms) -> Windows:
    """Returns a window of random area, aspect ratio and position in each image.

    The area is 8 to 100 % of the image, the aspect ratio 3/4 to 4/3. The area and the logarithm of
    the ratio are uniform. The first of 10 tries that fits is used. If none fits, it is the largest
    central window whose ratio is within the bounds.

    Args:
      sizes: Sizes of the images, [k, 2].
      uniform: Random numbers, [k, 40].

    Reference: Szegedy et al.
    """
    draws = uniform.astype(np.float64).reshape(len(sizes), INCEPTION_TRIES, 4)
    size = sizes[:, None, :].astype(np.float64)
    low, high = INCEPTION_AREA
    area = size[..., 0] * size[..., 1] * (low + (high - low) * draws[..., 0])
    log_low, log_high = (math.log(bound) for bound in INCEPTION_ASPECT)
    aspect = np.exp(log_low + (log_high - log_low) * draws[..., 1])
    extent = np.rint(np.sqrt(np.stack([area / aspect, area * aspect], axis=-1)))
    fits = np.all((extent >= 1) & (extent <= size), axis=-1)
    # `argmax` returns the first try that fits, or try 0 if none does.
    choice = np.argmax(fits, axis=1)
    rows = np.arange(len(sizes))
    extent = extent[rows, choice]
    corner = np.floor(draws[rows, choice, 2:] * (sizes - extent + 1))
    tried = np.concatenate([corner, extent], axis=1).astype(np.int64)
    return np.where(np.any(fits, axis=1)[:, None], tried, _largest_windows(sizes))


def _largest_windows(sizes: Sizes) -> Windows:
    """Returns the largest central windows within the bounds `INCEPTION_ASPECT`."""
    height = sizes[:, 0]
    width = sizes[:, 1]
    low, high = INCEPTION_ASPECT
    extent = np.stack(
        [np.minimum(height, np.rint(width / low)), np.minimum(width, np.rint(height * high))],
        axis=1,
    ).astype(np.int64)
    extent = np.maximum(extent, 1)
    return np.concatenate([(sizes - extent) // 2, extent], axis=1)


def decode_ratios(windows: Windows, side: int) -> npt.NDArray[np.int64]:
    """Returns the reduction (1, 2, 4 or 8) at which each image is decoded.

    It is the largest one at which the window keeps at least `side` pixels in both directions. The
    decoder averages blocks of pixels; without that, a resize to `side` would alias.

    Args:
      windows: Windows in the stored images, [k, 4].
      side: Pixels of the output.

    Returns:
      int64 [k].
    """
    shorter_sides = windows[:, 2:].min(axis=1)
    ratios = np.ones(len(windows), np.int64)
    for ratio in (2, 4, 8):
        ratios[shorter_sides >= ratio * side] = ratio
    return ratios
