"""DALI as the decoder. What needs it is skipped where it is not installed; the rest stands in for
its pipelines.
"""

import importlib.util
import io
import logging
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet import config
from hybrid_imagenet.data import dali, images
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.training import build
from tests.data import support, test_pipeline
from tests.data.support import MemorySource
from tests.support import program


def installed():
    return bool(importlib.util.find_spec("nvidia")) and bool(
        importlib.util.find_spec("nvidia.dali")
    )


needs_dali = pytest.mark.skipif(
    not installed(), reason="NVIDIA DALI is not installed (the extra dali)"
)
N = 1003


def jpeg_of(image, **settings):
    return images.encode(image, "JPEG", **({"quality": 92} | settings))


def photographs(width, height):
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(image) for image in load_sample_images().images]
    return [image.resize((width, height), Image.Resampling.BICUBIC) for image in originals]


def through(decoder, contents, windows, side):
    """Squares of a batch as `batches` asks for them."""
    content_array = np.empty(len(contents), object)
    content_array[:] = contents
    kinds = np.array([images.decode_header(content)[0] for content in contents])
    branch, window = images.plan_decoding(kinds, np.array(windows), side)
    return decoder.decode(content_array, branch, window)


def by_tensorflow(contents, windows, side):
    return np.stack(
        [test_pipeline.decoded(*each, side) for each in zip(contents, windows, strict=True)]
    )


def by_dali(contents, windows, side, threads=2):
    return through(dali.DaliDecoder(len(contents), side, threads, None), contents, windows, side)


def difference(ours, theirs):
    return np.abs(ours.astype(float) - theirs.astype(float))


@needs_dali
@pytest.mark.parametrize("subsampling", [0, 2])
@pytest.mark.parametrize(
    "windows", [[(37, 51, 281, 375), (10, 3, 300, 230)], [(33, 50, 101, 101), (100, 100, 224, 224)]]
)
def test_photographs_are_within_one_grey_level_of_a_full_decode_and_of_tensorflow(
    windows, subsampling
):
    side = 160
    contents = [jpeg_of(image, subsampling=subsampling) for image in photographs(500, 375)]
    got = by_dali(contents, windows, side)
    for square, content, (y, x, height, width) in zip(got, contents, windows, strict=True):
        whole = tf.io.decode_jpeg(content, dct_method="INTEGER_FAST")
        assert (
            difference(
                square, images.resize(whole[y : y + height, x : x + width], side).numpy()
            ).max()
            <= 1
        )
    apart = difference(got, by_tensorflow(contents, windows, side))
    # With reduced chroma libjpeg's cropping invents the color beyond the window's right border.
    assert apart[:, :, : side - 1 if subsampling else side].max() <= 1
    assert apart.mean() < 0.005


@needs_dali
def test_every_kind_of_image_comes_out_as_tensorflow_sees_it():
    picture = photographs(120, 90)[1]
    full = {"subsampling": 0}  # all decoders crop full chroma alike
    turned = Image.Exif()
    turned[0x0112] = 6  # EXIF: rotated by a quarter
    left_out = [
        images.encode(picture, "PNG"),
        jpeg_of(picture.convert("CMYK")),
        jpeg_of(picture, keep_rgb=True),
    ]
    plain = [
        jpeg_of(picture, **full),
        jpeg_of(picture.convert("L")),
        jpeg_of(picture, progressive=True, **full),
    ]
    plain.append(jpeg_of(picture, exif=turned, **full))
    contents = [image for pair in zip(left_out, plain, strict=True) for image in pair]
    windows = [(5, 9, 80, 100)] * len(contents)
    ours, theirs = by_dali(contents, windows, 64), by_tensorflow(contents, windows, 64)
    np.testing.assert_array_equal(ours[::2], theirs[::2])
    assert difference(ours[1::2], theirs[1::2]).max() <= 1


def memory(count, **bad):
    """Distinct images with full chroma, which all decoders crop alike."""
    source = MemorySource(count, **bad)
    source.images = [
        jpeg_of(Image.open(io.BytesIO(support.jpeg(number, 12, 16))), subsampling=0)
        for number in range(40)
    ]
    return source


def train(source, order, rank=0, size=1, batch=16, **options):
    return test_pipeline.train(source, order, Cursor(), (batch, 1), rank, size, **options)


@needs_dali
@pytest.mark.parametrize("size", [1, 3])
def test_an_epoch_sees_each_of_1003_examples_once_with_the_same_seeds_and_pixels(size):
    order, source = SampleOrder(N, seed=2), memory(N)
    seen = []
    for rank in range(size):
        ours, theirs = (
            list(train(source, order, rank, size, decoder=name)) for name in ("dali", "tensorflow")
        )
        assert len(ours) == len(theirs) == -(-N // (16 * size))
        for element, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(element["label"], expected["label"])
            np.testing.assert_array_equal(element["seed"], expected["seed"])
            assert element["image"].dtype == tf.uint8
            assert difference(element["image"].numpy(), expected["image"].numpy()).max() <= 1
        seen.append([element["label"].numpy().tolist() for element in ours])
    flat = [label for step in zip(*seen, strict=True) for part in step for label in part]
    assert sorted(flat[:N]) == list(range(N))


@needs_dali
def test_check_installation_with_a_missing_gpu_raises_one_line():
    with pytest.raises(
        UserError,
        match=r"^--decoder=dali: NVIDIA DALI does not run on GPU 99 \(.+\)\. Omit --decoder",
    ):
        dali.check_installation(99)


class StandIn:
    """In place of a pipeline: fills each square with the height of its window; breaks on some
    images.
    """

    rejected: tuple[bytes, ...] = ()
    made = 0

    def __init__(self, batch, side, threads, gpu, accurate):
        type(self).made += 1
        self._side, self._broken = side, False

    def run(self, encoded, shape, **_):
        if self._broken:
            raise RuntimeError("Current pipeline object is no longer valid")
        if any(content.tobytes() in self.rejected for content in encoded):
            self._broken = True
            raise RuntimeError("Critical error\nencountered:\n\nnot to my taste")
        self._squares = np.empty((len(encoded), self._side, self._side, 3), np.uint8)
        self._squares[:] = shape[:, 0, None, None, None]
        return (self,)

    def as_array(self):
        return self._squares


@pytest.fixture
def stand_in(monkeypatch):
    kind = type("Fresh", (StandIn,), {})
    monkeypatch.setattr(dali, "_pipeline", kind)
    return kind


def test_only_plain_jpegs_go_to_dali(stand_in):
    contents = [
        support.jpeg(0),
        support.png(1),
        support.jpeg(2, mode="CMYK"),
        support.jpeg(3, mode="L"),
    ]
    windows = [(0, 0, 15, 15), (1, 2, 9, 8), (0, 0, 20, 24), (3, 1, 11, 11)]
    got = by_dali(contents, windows, 8)
    assert (got[0] == 15).all()
    assert (got[3] == 11).all()
    np.testing.assert_array_equal(got[1:3], by_tensorflow(contents, windows, 8)[1:3])


def test_tensorflow_decodes_images_that_dali_rejects_and_one_warning_is_logged(stand_in, caplog):
    contents = [support.jpeg(0), support.jpeg(1), support.jpeg(2)]
    stand_in.rejected = (contents[1],)
    decoder, windows = dali.DaliDecoder(3, 8, 2, None), [(0, 0, 15, 14)] * 3
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = through(decoder, contents, windows, 8)
            assert (got[[0, 2]] == 15).all()
            np.testing.assert_array_equal(got[1], by_tensorflow(contents, windows, 8)[1])
    assert caplog.text.count("DALI rejects an image (not to my taste)") == 1
    assert (
        stand_in.made == 2 + 2 * 2
    )  # the slots, and new ones for the batch and for the image alone


def test_a_record_that_both_decoders_reject_is_bad(stand_in):
    broken = memory(4, undecodable={2})
    stand_in.rejected = (broken.read_one(2)[0],)
    batches = train(broken, SampleOrder(4), batch=4, bad_records="skip", decoder="dali")
    (element,) = batches
    assert sorted(element["label"].numpy().tolist()) == [0, 1, 3, 3]
    assert set(batches.bad_records.reasons) == {2}


def test_a_failure_that_no_image_explains_is_no_bad_record(stand_in, monkeypatch):
    def fails(self, **_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stand_in, "run", fails)
    batches = train(memory(8), SampleOrder(8), batch=4, bad_records="skip", decoder="dali")
    with pytest.raises(tf.errors.OpError, match="out of memory"):
        list(batches)
    assert not batches.bad_records.reasons


def test_read_ahead_limits_of_dali_include_the_decoded_pixels():
    batches = train(memory(8), SampleOrder(8), memory_bytes=4 << 20, readers=8, decoder="dali")
    assert batches._builder._read_ahead_limits(4, 512) == (1, 1)  # 1 MiB encoded, 3 MiB decoded
    batches = train(memory(8), SampleOrder(8), memory_bytes=4 << 20, readers=8)
    assert batches._builder._read_ahead_limits(4, 512) == (2, 1)


def marked(transform):
    """An image with an Adobe segment, which states whether its colors were transformed."""
    segment = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])
    return support.jpeg(0)[:2] + segment + support.jpeg(0)[2:]


@pytest.mark.parametrize(
    ("content", "plain"),
    [
        (support.jpeg(0), True),
        (marked(1), True),
        (marked(0), False),
        (support.jpeg(0, mode="L"), True),
        (support.jpeg(0, mode="CMYK"), False),
        (jpeg_of(Image.new("RGB", (9, 7)), progressive=True), True),
        (jpeg_of(Image.new("RGB", (9, 7)), keep_rgb=True), False),
        (
            support.jpeg(0).replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
            False,
        ),  # 12 bits
        (
            support.jpeg(0).replace(b"\xff\xc0\x00\x11", b"\xff\xc9\x00\x11"),
            False,
        ),  # arithmetic codes
        (support.png(0), False),
        (b"", False),
    ],
)
def test_is_plain_jpeg_looks_at_the_header(content, plain):
    assert images.is_plain_jpeg(content) is plain


def test_a_missing_dali_package_raises_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(
        UserError, match=r"^--decoder=dali: NVIDIA DALI cannot be loaded \(.*nvidia.*\)\. Install"
    ):
        build.check_decoder(config.resolve(["--decoder=dali", "--dataset=digits"]))
    build.check_decoder(config.resolve(["--dataset=digits"]))


def test_physical_gpu_returns_the_number_of_the_machine(monkeypatch):
    shown = [tf.config.PhysicalDevice("/physical_device:GPU:3", "GPU")]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: shown)
    assert dali.physical_gpu("/gpu:0") == 3
    assert dali.physical_gpu("/cpu:0") is None
    assert dali.physical_gpu(None) is None


@needs_dali
def test_two_ranks_train_as_with_tensorflow(pools, tiny_data, tmp_path):
    epochs = {}
    for decoder in ("dali", "tensorflow"):
        done = program.train_on(
            pools[2], tiny_data, tmp_path / decoder, f"--decoder={decoder}", "--epochs=2"
        )
        assert done.returncode == 0, done.stderr
        epochs[decoder] = program.without_times(tmp_path / decoder)
    assert len(epochs["dali"]) == len(epochs["tensorflow"]) == 2
    for ours, theirs in zip(epochs["dali"], epochs["tensorflow"], strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["val_count"] == program.VALIDATION
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.02)
