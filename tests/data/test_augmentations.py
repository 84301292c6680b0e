"""Tests the windows of augmentations that the host chooses."""

import numpy as np
import pytest

from hybrid_imagenet.data import augmentations
from tests.references import augment_reference


def draws(count, k=200, seed=0):
    return np.random.default_rng(seed).random((k, count), np.float32)


def sizes(k=200, seed=1):
    return np.random.default_rng(seed).integers(1, 600, (k, 2))


@pytest.mark.parametrize("name", augmentations.AUGMENTATIONS)
def test_training_windows_are_inside_the_image(name):
    size = sizes()
    host = augmentations.host_augmentation(name, 224)
    window = augmentations.training_windows(name, size, draws(host.num_draws))
    assert (window[:, :2] >= 0).all()
    assert (window[:, 2:] >= 1).all()
    assert (window[:, :2] + window[:, 2:] <= size).all()


def test_alexnet_windows_have_224_256ths_of_the_shorter_side_anywhere():
    size = np.repeat([[375, 500]], 5000, axis=0)
    window = augmentations.alexnet_windows(size, draws(2, 5000))
    # 375 * 224 / 256 = 328.
    assert (window[:, 2:] == 328).all()
    assert set(window[:, 0]) == set(range(48))
    assert set(window[:, 1]) == set(range(173))


def test_center_windows_equal_the_center_crop_after_a_resize():
    assert augmentations.center_windows(np.array([[375, 500], [256, 256]]), 0.875).tolist() == [
        [23, 86, 328, 328],
        [16, 16, 224, 224],
    ]


def test_inception_windows_equal_the_reference():
    size = sizes()
    uniform = draws(40).astype(np.float64).astype(np.float32)
    windows = augmentations.inception_windows(size, uniform)
    fallbacks = 0
    for (height, width), row, window in zip(size, uniform, windows, strict=True):
        expected = augment_reference.inception_window(
            height, width, row.astype(np.float64).reshape(10, 4)
        )
        if expected is None:
            fallbacks += 1
            assert 3 / 4 - 0.02 <= window[3] / window[2] <= 4 / 3 + 0.02 or min(height, width) < 30
        else:
            assert tuple(window) == expected
    assert 0 < fallbacks < 100


def test_decode_ratios_keep_enough_pixels():
    extents = np.array([447, 448, 895, 896, 1791, 1792, 5000])
    window = np.stack(
        [np.zeros_like(extents), np.zeros_like(extents), extents, extents + 7], axis=1
    )
    assert augmentations.decode_ratios(window, 224).tolist() == [1, 2, 2, 4, 4, 8, 8]


def test_evaluation_fraction_of_digits_is_the_whole_image():
    assert augmentations.evaluation_fraction("digits") == 1
    assert augmentations.evaluation_fraction("alexnet") == 0.875


@pytest.mark.parametrize("side", [32, 64, 128, 160, 192, 224, 299])
def test_input_side_inverts_the_host_side_of_the_flash_augmentation(side):
    host_side = augmentations.host_augmentation("flash", side).side
    assert augmentations.input_side("flash", host_side) == side
