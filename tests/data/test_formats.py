"""Tests WebP and JPEG XL images in every form of dataset, and unsupported formats."""

import base64
import io
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet.commands.data import data_command
from hybrid_imagenet.data import datasets, images, pipeline
from tests.data import support
from tests.data.test_sources import cache  # noqa: F401

Y, X = np.mgrid[:12, :16]
PIXELS = np.stack([15 * X, 20 * Y, 4 * (X + Y)], axis=-1).astype(np.uint8)
# `PIXELS` as lossless JPEG XL: in RGB, with transparency, only its red channel as gray, and in RGB
# with an orientation of 3 (turned by 180 degrees) and of 6 (turned by 90 degrees).
JXL = {
    "RGB": base64.b64decode(
        "/wpYMBAJCAABAAgBSzhA9TJ1vlA4+K6CgpKgAOMOFYACsTFmIi2MwYQwhhcBBuDaKCEAth+pqhJ+qius/oOi/tgEXctYnsOMkXsXxBoB"
    ),
    "RGBA": base64.b64decode(
        "/wpYMLASCAAQABgBSygz3TwjOiiFg+8WCksFBYUAww0k8GZExzvG4F+PMUYehzS4CDAAQ7rxIygIal+Enw4ID6gn"
        "xBnwvoPZIzezaHIA8wJhAQ=="
    ),
    "L": base64.b64decode("/wpYMBAUNwIIAAEAXABLKDXGHt8KCiYYsTSOyxiVd/79/5lCAQ=="),
    "turned by 180": base64.b64decode(
        "/wpYMAXEBAgAAQAIAUs4QPUydb5QOPiugoKSoADjDhWAArExZiItjMGEMIYXAQbg2ighALYfqaoSfqorrP6Dov7YBF3LWJ7DjJF7F8QaAQ=="
    ),
    "turned by 90": base64.b64decode(
        "/wpYMAvEBAgAAQAIAUs4QPUydb5QOPiugoKSoADjDhWAArExZiItjMGEMIYXAQbg2ighALYfqaoSfqorrP6Dov7YBF3LWJ7DjJF7F8QaAQ=="
    ),
}
EXPECTED = {
    "RGB": PIXELS,
    "RGBA": PIXELS,
    "L": PIXELS[..., [0, 0, 0]],
    "turned by 180": PIXELS[::-1, ::-1],
    "turned by 90": np.rot90(PIXELS, -1),
}

needs_webp = pytest.mark.skipif(
    not images._has_operation("decode_web_p"), reason="TensorFlow does not decode WebP"
)
needs_jxl = pytest.mark.skipif(
    not images._has_operation("decode_jxl"), reason="TensorFlow does not decode JPEG XL"
)


def webp(mode="RGB", height=20, width=24, **options):
    image = Image.open(io.BytesIO(support.jpeg(3, height, width))).convert(mode)
    if mode == "RGBA":
        image.putalpha(image.getchannel(0))
    return images.encode(image, "WEBP", **options)


def animated_webp():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    return images.encode(frames[0], "WEBP", save_all=True, append_images=frames[1:])


def decode_window(content, window=None, side=None):
    """Decodes a window as training does; by default a whole square image at its own size."""
    kind, height, width = images.decode_header(content)
    branch, scaled = images.plan_decoding(
        np.array([kind]), np.array([window or (0, 0, height, width)]), side or height
    )
    return images.decode(
        tf.constant(content), tf.constant(branch[0]), tf.constant(scaled[0]), side or height
    ).numpy()


def test_decode_traces_the_decoder_of_other_formats_once_per_kind():
    # Each trace of `decode_image` would delay the first step by a tenth of a second.
    with mock.patch.object(tf.io, "decode_image", wraps=tf.io.decode_image) as decode_image:
        tf.function(images.decode, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.string),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([4], tf.int32),
            8,
        )
    assert decode_image.call_count == 2


@needs_webp
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("options", [{"quality": 80}, {"lossless": True, "exact": True}])
def test_decode_of_webp_returns_the_pixels_of_pillow(mode, options):
    content = webp(mode, 32, 32, **options)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(decode_window(content), expected)
    np.testing.assert_array_equal(images.decode_whole(content), expected)


@needs_webp
@pytest.mark.parametrize(
    "options", [{"quality": 80}, {"lossless": True}, {"quality": 80, "exif": b"Exif\0\0"}]
)
def test_decode_header_of_webp_returns_the_size_and_rejects_a_cut_file(options):
    content = webp(height=33, width=70, **options)
    assert images.decode_header(content) == (images.ANY_CHANNELS, 33, 70)
    assert images.decode_header(content + b"more")[1:] == (33, 70)
    for length in (13, 25, len(content) - 3):
        with pytest.raises(ValueError, match="the WebP is truncated"):
            images.decode_header(content[:length])


@needs_jxl
@pytest.mark.parametrize("name", JXL)
def test_decode_of_jpeg_xl_returns_the_encoded_pixels(name):
    content = JXL[name]
    assert images.decode_header(content)[1:] == EXPECTED[name].shape[:2]
    np.testing.assert_array_equal(images.decode_whole(content), EXPECTED[name])
    window = (1, 2, 10, 10)
    np.testing.assert_array_equal(decode_window(content, window, 10), EXPECTED[name][1:11, 2:12])


@needs_jxl
def test_decode_of_jpeg_xl_in_a_container_with_parts_returns_the_encoded_pixels():
    def box(kind, content):
        return (8 + len(content)).to_bytes(4, "big") + kind + content

    signature = b"\x00\x00\x00\x0cJXL \r\n\x87\n" + box(b"ftyp", b"jxl \0\0\0\0jxl ")
    bare = JXL["RGB"]
    parts = box(b"jxlp", b"\0\0\0\0" + bare[:3]) + box(b"Exif", b"\0\0\0\0MM\0*")
    content = signature + parts + box(b"jxlp", b"\x80\0\0\1" + bare[3:])
    assert images.decode_header(content) == (images.ANY_CHANNELS, 12, 16)
    np.testing.assert_array_equal(images.decode_whole(content), PIXELS)


@needs_webp
@pytest.mark.parametrize("height", [64, 128])
def test_decode_of_a_large_webp_reduces_it_by_the_mean_of_blocks(height):
    pixels = np.full((height, height, 3), 200, np.uint8)
    pixels[:, np.arange(height) % 8 < 3] = 40
    content = images.encode(Image.fromarray(pixels), "WEBP", lossless=True)
    assert np.abs(decode_window(content, (0, 0, height, height), height // 8) - 140.0).max() <= 1


@needs_webp
@needs_jxl
@pytest.mark.parametrize("form", ["folder", "tfrecord", "parquet", "webdataset"])
def test_open_source_reads_webp_and_jpeg_xl_in_every_form_of_dataset(form, tmp_path):
    lossless = images.encode(Image.fromarray(PIXELS), "WEBP", lossless=True)
    pairs = [(lossless, 0), (JXL["RGB"], 1), (JXL["L"], 2)]
    for split in datasets.SPLITS:
        if form == "folder":
            for (content, label), suffix in zip(pairs, (".webp", ".jxl", ".JXL"), strict=True):
                directory = tmp_path / split / support.CLASSES[label]
                directory.mkdir(parents=True)
                (directory / f"image{suffix}").write_bytes(content)
        elif form == "tfrecord":
            support.write_shards(tmp_path, split, pairs, shards=1)
        elif form == "parquet":
            support.write_parquet(tmp_path, split, pairs, shards=1)
        else:
            suffixes = iter(("webp", "jxl", "jxl"))
            support.write_tars(
                tmp_path,
                split,
                pairs,
                3,
                lambda number, image, label, suffixes=suffixes: {
                    "__key__": str(number),
                    next(suffixes): image,
                    "cls": label,
                },
            )
    source = datasets.open_source(form, str(tmp_path), "validation", num_classes=3)
    (element,) = pipeline.evaluation_batches(source, 3, image_size=12, crop_fraction=1.0)
    assert element["label"].numpy().tolist() == [0, 1, 2]
    middle = PIXELS[:, 2:14]
    for image, expected in zip(
        element["image"].numpy(), [middle, middle, middle[..., [0, 0, 0]]], strict=True
    ):
        np.testing.assert_array_equal(image, expected)
    assert not source.notes


@needs_webp
@needs_jxl
def test_prepare_with_resize_reads_webp_and_jpeg_xl(tmp_path, capsys):
    for split in datasets.SPLITS:
        for name, content in (("a.webp", webp(height=40, width=40)), ("b.jxl", JXL["RGBA"])):
            (tmp_path / "from" / split / name[0]).mkdir(parents=True)
            (tmp_path / "from" / split / name[0] / name).write_bytes(content)
    data_dir = f"--data_dir={tmp_path / 'from'}"
    assert data_command.main(["check", "--dataset=folder", data_dir, "--workers=1"]) == 0
    assert "no faults" in capsys.readouterr().out
    target = f"--to={tmp_path / 'to'}"
    assert (
        data_command.main(
            [
                "prepare",
                "--from=folder",
                data_dir,
                target,
                "--resize=10",
                "--quality=100",
                "--workers=1",
            ]
        )
        == 0
    )
    prepared = datasets.open_source("tfrecord", str(tmp_path / "to")).read_one(1)[0]
    assert images.decode_header(prepared) == (images.JPEG, 10, 13)
    with Image.open(io.BytesIO(prepared)) as smaller:
        assert np.abs(np.asarray(smaller).mean((0, 1)) - PIXELS.mean((0, 1))).max() < 3


def animated_jxl():
    """Returns a header with extra fields, of which the last one announces an animation."""
    content = JXL["turned by 180"]
    # The size takes 15 bits. Then there is one bit for default metadata, one for extra fields, and
    # three bits of orientation.
    size = 15
    flags = int.from_bytes(content[2:], "little") | 1 << (size + 2 + 3 + 2)
    return content[:2] + flags.to_bytes(len(content) - 2, "little")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(
            animated_webp(),
            "the WebP is animated, which is not supported: convert it",
            marks=needs_webp,
        ),
        pytest.param(
            b"RIFF\x20\0\0\0WEBPVP8 " + bytes(40),
            "the WebP has no header of an image",
            marks=needs_webp,
        ),
        pytest.param(
            b"\x00\x00\x00\x0cJXL \r\n\x87\n" + bytes(40),
            "the JPEG XL has no header",
            marks=needs_jxl,
        ),
        pytest.param(
            animated_jxl(), "the JPEG XL is animated, which is not supported", marks=needs_jxl
        ),
        (
            b"II*\0" + bytes(40),
            "is a TIFF image, which is not supported: convert it, for example with .mogrify",
        ),
        (b"\0\0\0\x20ftypavif" + bytes(40), "is an AVIF image, which is not supported"),
        (b"\0\0\0\x20ftypheic" + bytes(40), "is a HEIC image, which is not supported"),
        (
            b"RIFF\x20\0\0\0WAVE" + bytes(40),
            r"is not a JPEG, PNG, BMP, GIF, WebP or JPEG XL image .it begins with b'RIFF'",
        ),
    ],
    ids=[
        "animated WebP",
        "damaged WebP",
        "damaged JPEG XL",
        "animated JPEG XL",
        "TIFF",
        "AVIF",
        "HEIC",
        "WAV",
    ],
)
def test_decode_header_of_an_unsupported_image_names_its_format(content, reason):
    with pytest.raises(ValueError, match=reason):
        images.decode_header(content)


def test_decode_header_with_a_tensorflow_that_lacks_the_decoder_names_format_and_version(
    monkeypatch,
):
    monkeypatch.setattr(images, "_has_operation", lambda name: False)
    with pytest.raises(
        ValueError,
        match=r"is a WebP image, which TensorFlow decodes from version 2\.20 on: install",
    ):
        images.decode_header(webp())
    with pytest.raises(
        ValueError,
        match=r"is a JPEG XL image, which TensorFlow decodes from version 2\.21 on.*convert",
    ):
        images.decode_header(JXL["RGB"])


def test_has_operation_agrees_with_the_installed_tensorflow():
    for name, operation in (
        ("decode_web_p", "DecodeWebP"),
        ("decode_jxl", "DecodeJxl"),
        ("decode_bmp", "DecodeBmp"),
    ):
        assert images._has_operation(name) == hasattr(tf.raw_ops, operation)
    assert not images._has_operation("decode_nothing")
