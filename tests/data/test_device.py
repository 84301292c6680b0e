"""Tests the augmentations on the device."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.data import augmentations, device
from hybrid_imagenet.order import sampling
from tests.references import augment_reference

SEEDS = sampling.seeds(5, np.zeros(16, np.int64), np.arange(16))
IMAGES = np.random.default_rng(0).integers(0, 256, (16, 20, 20, 3), np.uint8)


def denormalized(images):
    return images.numpy() * np.array(device.STANDARD_DEVIATION) + np.array(device.MEAN)


def test_normalize_subtracts_mean_and_divides_by_standard_deviation():
    images = device.normalize(IMAGES)
    assert images.dtype == tf.float32
    expected = (IMAGES / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(images, expected, atol=1e-5)
    assert device.normalize(IMAGES, "float16").dtype == tf.float16


@pytest.mark.parametrize("start", [0, 64])
def test_uniforms_on_the_device_equal_those_on_the_host(start):
    seeds = np.concatenate([SEEDS, [[0, 0], [-1, 1], [2**63 - 1, -(2**63)]]])
    np.testing.assert_array_equal(
        device.uniforms(seeds, 7, start), sampling.uniforms(seeds, 7, start)
    )


def test_normals_have_the_moments_of_a_normal_distribution():
    seeds = sampling.seeds(1, np.zeros(20000, np.int64), np.arange(20000))
    values = device.normals(tf.constant(seeds), 3, 100).numpy()
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(np.cov(values.T), np.eye(3), atol=0.04)
    np.testing.assert_allclose((values**4).mean(axis=0), 3, atol=0.25)


def test_augment_inception_flips_about_half_of_the_images_and_changes_nothing_else():
    images = denormalized(device.augment(IMAGES, SEEDS, "inception")) * 255
    flips = sampling.uniforms(SEEDS, 1, augmentations.DEVICE_STREAM)[:, 0] < 0.5
    assert 3 < flips.sum() < 13
    for image, original, flip in zip(images, IMAGES, flips, strict=True):
        np.testing.assert_allclose(image, original[:, ::-1] if flip else original, atol=1e-2)


def test_augment_alexnet_adds_one_offset_along_the_colors_of_imagenet_per_image():
    offsets = denormalized(device.augment(IMAGES, SEEDS, "alexnet")) - denormalized(
        device.augment(IMAGES, SEEDS, "inception")
    )
    u = sampling.uniforms(SEEDS, 6, augmentations.DEVICE_STREAM + 1).astype(np.float64)
    alphas = 0.1 * np.sqrt(-2 * np.log(1 - u[:, :3])) * np.cos(2 * np.pi * u[:, 3:])
    for offset, alpha in zip(offsets, alphas, strict=True):
        expected = np.broadcast_to(augment_reference.pca_noise(alpha), offset.shape)
        np.testing.assert_allclose(offset, expected, atol=1e-6)


def test_augment_shift_crops_the_padded_image_and_may_flip_it():
    images = np.rint(denormalized(device.augment(IMAGES, SEEDS, "shift")) * 255)
    pad = device.shift_bound(20)
    assert pad == 2
    draws = sampling.uniforms(SEEDS, 3, augmentations.DEVICE_STREAM)
    offsets = np.floor(draws[:, 1:] * (2 * pad + 1)).astype(int)
    assert len(np.unique(offsets)) == 2 * pad + 1
    for image, original, flip, (x, y) in zip(
        images, IMAGES, draws[:, 0] < 0.5, offsets, strict=True
    ):
        padded = np.pad(original, ((pad, pad), (pad, pad), (0, 0)))
        window = padded[y : y + 20, x : x + 20]
        np.testing.assert_array_equal(image, window[:, ::-1] if flip else window)


@pytest.mark.parametrize("pad", [0, 2])
def test_augment_flash_equals_the_reference_with_and_without_padding(pad):
    # 32 pixels of 320 are 2 pixels of 20.
    images = denormalized(
        device.augment(IMAGES, SEEDS, "flash", flash=augmentations.FlashRanges(pad=16 * pad))
    )
    assert images.shape == (16, 14, 14, 3)
    u = sampling.uniforms(SEEDS, 11, augmentations.DEVICE_STREAM).astype(np.float64)
    for image, original, draws in zip(images, IMAGES, u, strict=True):
        padded = np.pad(original / 255, ((pad, pad), (pad, pad), (0, 0)))
        np.testing.assert_allclose(image, augment_reference.flash(padded, 14, draws), atol=2e-4)


def test_augment_flash_with_noise_and_brightness_adds_them():
    plain = denormalized(device.augment(IMAGES, SEEDS, "flash", flash=augmentations.FlashRanges()))
    fixed_contrast = augmentations.FlashRanges(contrast=1.0)
    calm = denormalized(device.augment(IMAGES, SEEDS, "flash", flash=fixed_contrast))
    bright = denormalized(
        device.augment(
            IMAGES, SEEDS, "flash", flash=augmentations.FlashRanges(contrast=1.0, brightness=0.2)
        )
    )
    noisy = denormalized(
        device.augment(
            IMAGES, SEEDS, "flash", flash=augmentations.FlashRanges(contrast=1.0, noise=0.1)
        )
    )
    assert np.abs(plain - calm).max() > 0.01
    u = sampling.uniforms(SEEDS, 12, augmentations.DEVICE_STREAM)
    expected = np.broadcast_to((0.2 * (2 * u[:, 7] - 1))[:, None, None, None], calm.shape)
    np.testing.assert_allclose(bright - calm, expected, atol=1e-5)
    measured = (noisy - calm).std(axis=(1, 2, 3))
    np.testing.assert_allclose(measured, 0.1 * u[:, 11], rtol=0.15, atol=1e-4)


def test_augment_digits_moves_images_a_little_and_never_flips_them():
    arrow = np.zeros((16, 33, 33, 3), np.uint8)
    # The arrow points right.
    arrow[:, 14:19, 16:28] = 255
    images = device.augment(arrow, SEEDS, "digits")
    pixels = denormalized(images)[..., 0]
    columns = np.arange(33)
    middle = (pixels.sum(axis=1) * columns).sum(axis=1) / pixels.sum(axis=(1, 2))
    assert (middle > 17).all()
    assert middle.std() > 0.3
    assert images.shape == (16, 33, 33, 3)
