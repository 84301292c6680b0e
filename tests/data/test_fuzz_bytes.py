"""Tests that damaged TFRecords and images raise an error with a reason, or are read correctly."""

import random

import numpy as np
import tensorflow as tf

from hybrid_imagenet.data import images
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.source import BadRecord
from hybrid_imagenet.errors import UserError
from tests.data.support import jpeg, png
from tests.data.test_formats import JXL, webp


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Returns the bytes with some flipped, cut, repeated, inserted, zeroed or replaced."""
    at = generator.randrange(len(content))
    to = min(len(content), at + generator.choice((1, 2, 4, 16, 200)))
    kind_of_damage = generator.randrange(7)
    if kind_of_damage == 0:
        return (
            content[:at] + bytes([content[at] ^ (1 << generator.randrange(8))]) + content[at + 1 :]
        )
    if kind_of_damage == 1:
        return content[:at]
    if kind_of_damage == 2:
        return content[:at] + content[to:]
    if kind_of_damage == 3:
        return content[:to] + content[at:]
    if kind_of_damage == 4:
        return content[:at] + generator.randbytes(to - at) + content[at:]
    if kind_of_damage == 5:
        return content[:at] + bytes(to - at) + content[to:]
    return content[:at] + b"\xff" * (to - at) + content[to:]


def test_read_of_damaged_shards_returns_original_examples_or_raises(tmp_path):
    # Every record that is read must have its original image and label. Others must be BadRecord.
    pairs = [(jpeg(number), number % 3) for number in range(6)]
    frames = [
        tfrecord.frame(tfrecord.encode_example({"image": image, "label": label}))
        for image, label in pairs
    ]
    generator = random.Random(1)
    originals = {image for image, _ in pairs}
    for number in range(150):
        path = tmp_path / f"train-{number:05d}"
        path.write_bytes(damaged(b"".join(frames), generator))
        try:
            source = tfrecord.ShardSource(
                (path,), ("a", "b", "c"), index=tfrecord.scan_shards((path,))
            )
        except UserError as error:
            assert str(path) in str(error) or str(tmp_path) in str(error)
            continue
        for index in range(source.num_examples):
            try:
                image, label = source.read_one(index)
            except BadRecord as error:
                assert error.reason
            else:
                assert image in originals
                assert 0 <= label < 3


def test_decode_of_damaged_images_returns_pixels_or_raises():
    # TensorFlow decodes only images whose header was accepted.
    signature = [
        tf.TensorSpec((), tf.string),
        tf.TensorSpec((), tf.int32),
        tf.TensorSpec(4, tf.int32),
    ]

    @tf.function(input_signature=signature)
    def decode_image(content, branch, window):
        return images.decode(content, branch, window, 16)

    generator = random.Random(3)
    originals = [
        jpeg(1),
        jpeg(2, mode="L"),
        jpeg(3, mode="CMYK"),
        png(4),
        webp(),
        webp("RGBA"),
        *JXL.values(),
    ]
    for number in range(500):
        content = damaged(originals[number % len(originals)], generator)
        try:
            kind, height, width = images.decode_header(content)
        except ValueError as error:
            assert str(error)
            continue
        assert height > 0
        assert width > 0
        branch, window = images.plan_decoding(
            np.array([kind]), np.array([[0, 0, height, width]]), 16
        )
        try:
            image = decode_image(
                tf.constant(content), tf.constant(branch[0]), tf.constant(window[0])
            )
        except tf.errors.OpError as error:
            assert error.message
        else:
            assert image.shape == (16, 16, 3)
