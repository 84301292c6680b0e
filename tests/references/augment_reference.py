"""Oracles for the augmentations, written from the papers with plain loops."""

import math

import numpy as np


def bilinear(image, y, x):
    """Returns one pixel of [h, w, 3] at a fractional position, with the border continued."""
    height, width, _ = image.shape
    y = min(max(y, 0.0), height - 1.0)
    x = min(max(x, 0.0), width - 1.0)
    y0 = int(y)
    x0 = int(x)
    y1 = min(y0 + 1, height - 1)
    x1 = min(x0 + 1, width - 1)
    fy = y - y0
    fx = x - x0
    top = (1 - fx) * image[y0, x0] + fx * image[y0, x1]
    bottom = (1 - fx) * image[y1, x0] + fx * image[y1, x1]
    return (1 - fy) * top + fy * bottom


def resize(image, height, width):
    """Resizes bilinearly, with pixel centers at half integers."""
    out = np.empty((height, width, 3))
    for i in range(height):
        for j in range(width):
            y = (i + 0.5) * image.shape[0] / height - 0.5
            x = (j + 0.5) * image.shape[1] / width - 0.5
            out[i, j] = bilinear(image, y, x)
    return out


def pca_noise(alphas):
    """Returns the noise of one image, [p1 p2 p3] [a1 l1, a2 l2, a3 l3]^T.

    Reference: Krizhevsky et al., 4.1.
    """
    vectors = np.array(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )
    values = np.array([0.2175, 0.0188, 0.0045])
    total = np.zeros(3)
    for k in range(3):
        total += vectors[:, k] * alphas[k] * values[k]
    return total


def inception_window(height, width, draws):
    """Tries ten windows from (area, log aspect, y, x); returns None if none fits."""
    for area_draw, aspect_draw, y_draw, x_draw in draws:
        area = height * width * (0.08 + 0.92 * area_draw)
        aspect = (3 / 4) * ((4 / 3) / (3 / 4)) ** aspect_draw
        h = round(math.sqrt(area / aspect))
        w = round(math.sqrt(area * aspect))
        if 1 <= h <= height and 1 <= w <= width:
            return int(y_draw * (height - h + 1)), int(x_draw * (width - w + 1)), h, w
    return None


def flash(image, side, u, scale=(0.77, 1.54), angle=0.5, aspect=1.3, distortion=0.2, contrast=1.1):
    """Augments one image [n, n, 3] in [0, 1] as in Mikami et al., with its random numbers u.

    The numbers are for flip, scale, aspect, rotation, center x, center y, distortion, brightness,
    and three for contrast.
    """
    n = image.shape[0]
    s = scale[0] * (scale[1] / scale[0]) ** u[1]
    stretch = aspect ** (u[2] - 0.5)
    sx = s * stretch
    sy = s / stretch
    theta = -angle + 2 * angle * u[3]
    bulge = math.exp(distortion * (2 * u[6] - 1)) - 1
    middle = (side - 1) / 2
    out = np.empty((side, side, 3))
    for i in range(side):
        for j in range(side):
            a = j - middle
            b = i - middle
            r2 = (a / (side / 2)) ** 2 + (b / (side / 2)) ** 2
            a = a * (1 + bulge * r2) / (1 + bulge)
            b = b * (1 + bulge * r2) / (1 + bulge)
            if u[0] < 0.5:
                a = -a
            x = (
                (middle + u[4] * (n * sx - side)) / sx
                + math.cos(theta) * a / sx
                - math.sin(theta) * b / sy
            )
            y = (
                (middle + u[5] * (n * sy - side)) / sy
                + math.sin(theta) * a / sx
                + math.cos(theta) * b / sy
            )
            out[i, j] = bilinear(image, y, x)
    for c in range(3):
        out[..., c] = (out[..., c] - 0.5) * contrast ** (2 * u[8 + c] - 1) + 0.5
    return out
