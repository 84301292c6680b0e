"""Tests which images are decoded, and that commands see the pixels of training."""

import io
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet.commands.data import data_command, prepare
from hybrid_imagenet.data import datasets, images, pipeline
from tests.data import support


def deep_png(shape, seed=0):
    """Returns a PNG of 16 bits: gray, gray with alpha, RGB or RGBA."""
    height, width, channels = shape
    values = np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(">u2")
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]

    def chunk(name, content):
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def transparent_gif():
    colors = Image.open(io.BytesIO(support.jpeg(1))).quantize(8)
    return images.encode(colors, "GIF", transparency=3)


def cmyk_jpeg(*, adobe_marker):
    """Returns a CMYK JPEG; Adobe's marker says that it stores 255 for no ink instead of 0."""
    content = support.jpeg(2, 24, 24, "CMYK")
    start = content.index(b"\xff\xee")
    end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
    return content if adobe_marker else content[:start] + content[end:]


@pytest.mark.parametrize(
    "content",
    [
        transparent_gif(),
        cmyk_jpeg(adobe_marker=True),
        cmyk_jpeg(adobe_marker=False),
        support.jpeg(3, 33, 33),
        support.png(4),
        deep_png((20, 24, 1)),
    ],
    ids=["transparent GIF", "CMYK", "CMYK without marker", "JPEG", "PNG", "16 bits"],
)
def test_decode_whole_returns_the_pixels_of_evaluation(content):
    # At the edges of a crop the decoder interpolates colors in another way, so JPEGs are squares.
    _, height, width = images.decode_header(content)
    source = support.MemorySource(1)
    source.images = [content]
    (element,) = pipeline.evaluation_batches(source, 1, image_size=height, crop_fraction=1.0)
    left = (width - height) // 2
    np.testing.assert_array_equal(
        images.decode_whole(content)[:, left : left + height], element["image"].numpy()[0]
    )


def test_decode_whole_of_a_gif_with_a_smaller_frame_raises():
    # Training would fail, because it takes a window of the size in the header.
    content = bytearray(transparent_gif())
    content[6:10] = struct.pack("<HH", 100, 90)
    with pytest.raises(ValueError, match="has 24 x 20 pixels, but its header says 100 x 90"):
        images.decode_whole(bytes(content))


def test_prepare_with_resize_keeps_the_colors_of_a_cmyk_jpeg_without_marker(tmp_path):
    content = cmyk_jpeg(adobe_marker=False)
    resized, _, _ = prepare.shrink_image(content, *images.decode_header(content), 16, 100)
    expected = images.decode_whole(content).mean((0, 1))
    np.testing.assert_allclose(images.decode_whole(resized).mean((0, 1)), expected, atol=2)


@pytest.mark.parametrize(
    "decode", [images.decode_whole, lambda image: images.check_decodes(image, 8)]
)
def test_decoding_that_runs_out_of_memory_is_not_an_error_of_the_image(decode, monkeypatch):
    def run_out_of_memory(*arguments, **options):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(tf.io, "decode_image", run_out_of_memory)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        decode(support.png(1))


@pytest.mark.parametrize("channels", [1, 4])
def test_prepare_of_images_of_16_bits_keeps_the_pixels_of_training(channels, tmp_path):
    content = deep_png((24, 32, channels))
    expected = tf.io.decode_image(content, channels=3, expand_animations=False).numpy()
    np.testing.assert_array_equal(images.decode_whole(content), expected)
    for split in datasets.SPLITS:
        support.write_folder(tmp_path / "from", split, [(content, label) for label in range(3)])
    target = tmp_path / "to"
    directories = f"--data_dir={tmp_path / 'from'}", f"--to={target}"
    assert (
        data_command.main(
            [
                "prepare",
                "--from=folder",
                *directories,
                "--resize=24",
                "--quality=100",
                "--workers=1",
            ]
        )
        == 0
    )
    with Image.open(
        io.BytesIO(datasets.open_source("tfrecord", str(target)).read_one(0)[0])
    ) as prepared:
        assert np.abs(np.asarray(prepared).mean() - expected.mean()) < 1


def test_decode_header_of_a_bmp_with_a_palette_raises():
    # TensorFlow would decode an image with a palette as gray.
    picture = Image.open(io.BytesIO(support.jpeg(1)))
    for mode in ("L", "RGB", "P"):
        content = images.encode(picture.convert(mode), "BMP")
        if mode == "P":
            with pytest.raises(ValueError, match="palette"):
                images.decode_header(content)
        else:
            expected = tf.io.decode_image(content, channels=3).numpy()
            np.testing.assert_array_equal(images.decode_whole(content), expected)


def test_decode_header_of_a_progressive_jpeg_with_too_many_scans_raises():
    original = images.encode(Image.new("RGB", (8, 8)), "JPEG", progressive=True)
    assert images.decode_header(original)[1:] == (8, 8)
    scan = original[original.rindex(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match=r"has 1\d\d scans"):
        images.decode_header(original[:-2] + 100 * scan + original[-2:])


def test_decode_header_of_a_jpeg_with_too_many_scans_of_one_component_raises():
    original = bytearray(images.encode(Image.new("RGB", (8, 8)), "JPEG"))
    # In the pixels of a single scan these bytes have no meaning.
    many = 101 * b"\xff\xda"
    assert images.decode_header(bytes(original[:-2]) + many + bytes(original[-2:]))[1:] == (8, 8)
    # Now the first scan has one component of three.
    original[original.index(b"\xff\xda") + 4] = 1
    with pytest.raises(ValueError, match="has 102 scans"):
        images.decode_header(bytes(original[:-2]) + many + bytes(original[-2:]))
