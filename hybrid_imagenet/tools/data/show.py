"""Draws a contact sheet of images after the preprocessing of training and of evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from hybrid_imagenet.data import device, pipeline
from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.data.sources.derived import Subset
from hybrid_imagenet.numerics import augment
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder

_GAP = 2


def contact_sheet(
    source: Source, path: Path, *, augmentation: str, image_size: int, count: int, variants: int, seed: int
) -> None:
    """Writes a PNG with one row per image: as evaluated, then as `variants` training epochs see it.

    Raises:
      UserError: for a record that cannot be used.
    """
    from PIL import Image

    order = SampleOrder(source.num_examples, seed)
    chosen = order.at(0, np.arange(min(count, source.num_examples)))
    columns = [_evaluated(source, chosen, augmentation, image_size)]
    columns += [_trained(source, chosen, augmentation, image_size, seed, epoch) for epoch in range(variants)]
    padded = [np.pad(column, ((0, 0), (0, _GAP), (0, _GAP), (0, 0)), constant_values=255) for column in columns]
    sheet = np.concatenate([np.concatenate(list(column), axis=0) for column in padded], axis=1)
    Image.fromarray(sheet).save(path, "PNG")


def _evaluated(source: Source, chosen: np.ndarray, augmentation: str, image_size: int) -> np.ndarray:
    fraction = augment.evaluation_fraction(augmentation)
    part = Subset(source, chosen)
    batches = pipeline.evaluation(part, len(chosen), image_size=image_size, crop_fraction=fraction)
    return np.asarray(next(iter(batches))["image"].numpy())


def _trained(
    source: Source, chosen: np.ndarray, augmentation: str, image_size: int, seed: int, epoch: int
) -> np.ndarray:
    order = SampleOrder(len(chosen), seed, shuffle=False)
    batches = pipeline.training(
        Subset(source, chosen),
        order,
        Cursor(epoch),
        (len(chosen), 1),
        epochs=epoch + 1,
        image_size=image_size,
        augmentation=augmentation,
    )
    element = next(iter(batches))
    pixels = device.augment(element["image"], element["seed"], augmentation)
    pixels = (pixels * tf.constant(device.DEVIATION) + tf.constant(device.MEAN)) * 255
    return np.asarray(tf.cast(tf.clip_by_value(tf.round(pixels), 0, 255), tf.uint8).numpy())
