"""Tests the input pipeline: order, sizes, bad records, decoding and reading ahead."""

import collections
import io
import logging
import random
import struct
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hybrid_imagenet.data import images, pipeline
from hybrid_imagenet.data.bad_records import BadRecords, ExampleReader
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from tests.data import support
from tests.data.support import MemorySource
from tests.references import augment_reference
from tests.support.processes import wait_for

N = 1003
SOURCE = MemorySource(N)


def labels(batches):
    return [element["label"].numpy().tolist() for element in batches]


def train(source, order, start, sizes, rank, size, epochs=1, **options):
    return pipeline.training_batches(
        source, order, start, sizes, rank, size,
        epochs=epochs, image_size=8, augmentation="inception", options=HostOptions(**options),
    )  # fmt: skip


def test_training_batches_may_change_their_size_between_epochs_on_all_ranks():
    order = SampleOrder(N, seed=4)
    sizes = {0: (32, 1), 1: (48, 1), 2: (32, 3)}.__getitem__
    ranks = [labels(train(SOURCE, order, Cursor(), sizes, rank, 3, epochs=3)) for rank in range(3)]
    lengths = [[len(element) for element in elements] for elements in ranks]
    assert lengths[0] == lengths[1] == lengths[2]
    counts = collections.Counter(
        label for elements in ranks for element in elements for label in element
    )
    total = sum(counts.values())
    assert set(counts.values()) <= {3, 4}
    assert len(counts) == N
    # Only the last step reaches beyond the third epoch.
    assert total - 3 * N < 3 * 32 * 3
    cursor = Cursor()
    steps = collections.Counter()
    while cursor.epoch < 3:
        batch, accumulation = sizes(cursor.epoch)
        steps[batch, accumulation] += accumulation
        cursor = order.advance(cursor, 3 * batch * accumulation)
    assert lengths[0] == [batch for (batch, _), count in steps.items() for _ in range(count)]


def test_training_batches_may_change_the_image_size_and_resume_at_the_boundary():
    order = SampleOrder(N, seed=4)
    sizes = {0: 8, 1: 12, 2: 12}.__getitem__

    def run(start):
        batches = pipeline.training_batches(
            SOURCE,
            order,
            start,
            (64, 2),
            epochs=3,
            image_size=sizes,
            augmentation="inception",
            options=HostOptions(),
        )
        return [
            (e["image"].shape[1], e["label"].numpy().tolist(), e["seed"].numpy().tolist())
            for e in batches
        ]

    whole = run(Cursor())
    # The last step extends into epoch 1, at the size of the epoch in which it begins.
    steps = order.batches_in_epoch(128)
    assert [side for side, _, _ in whole[: 2 * steps]] == [8] * 2 * steps
    assert {side for side, _, _ in whole[2 * steps :]} == {12}
    boundary = order.advance(Cursor(), 128, steps)
    assert run(boundary) == whole[2 * steps :]
    assert run(order.advance(Cursor(), 128, steps - 1)) == whole[2 * steps - 2 :]


def test_training_batches_resumed_on_other_ranks_have_exactly_the_remaining_examples():
    order = SampleOrder(N, seed=9)
    labels_so_far = []
    cursor = Cursor()
    for stop, size, batch in ((7, 2, 10), (3, 4, 16), (10**6, 3, 11)):
        ranks = [iter(train(SOURCE, order, cursor, (batch, 1), rank, size)) for rank in range(size)]
        for _ in range(stop):
            if cursor.epoch:
                break
            for rank in ranks:
                labels_so_far += next(rank)["label"].numpy().tolist()
            cursor = order.advance(cursor, size * batch)
    assert sorted(labels_so_far[:N]) == list(range(N))


def test_training_batches_from_a_later_cursor_do_not_read_earlier_examples():
    source = MemorySource(N)
    batches = iter(
        train(source, SampleOrder(N), Cursor(3, 900), (4, 1), 0, 1, epochs=4, readers=1, prefetch=1)
    )
    next(batches)
    # The limit is the batch, and the batches that are read ahead.
    assert source.reads <= 40


def test_training_batches_do_not_depend_on_the_numbers_of_ranks_and_threads():
    order = SampleOrder(N, seed=1)
    alone = next(iter(train(SOURCE, order, Cursor(2, 50), (12, 1), 0, 1, epochs=3, threads=1)))
    shared = [
        next(iter(train(SOURCE, order, Cursor(2, 50), (4, 1), r, 3, epochs=3, threads=3)))
        for r in range(3)
    ]
    for key in ("image", "label", "seed"):
        np.testing.assert_array_equal(
            alone[key], np.concatenate([element[key] for element in shared])
        )
    other_epoch = next(iter(train(SOURCE, order, Cursor(3, 50), (12, 1), 0, 1, epochs=4)))
    assert not set(alone["seed"].numpy()[:, 0]) & set(other_epoch["seed"].numpy()[:, 0])


@pytest.mark.parametrize(("n", "size", "batch"), [(1, 4, 3), (13, 3, 4), (31, 4, 8)])
def test_evaluation_batches_have_each_image_once_and_equal_steps_on_all_ranks(n, size, batch):
    source = MemorySource(n)
    counts = collections.Counter()
    steps = set()
    for rank in range(size):
        elements = list(pipeline.evaluation_batches(source, batch, rank, size, image_size=8))
        steps.add(len(elements))
        for element in elements:
            assert element["image"].shape == (batch, 8, 8, 3)
            for label, weight in zip(
                element["label"].numpy(), element["weight"].numpy(), strict=True
            ):
                counts[int(label)] += float(weight)
    assert len(steps) == 1
    assert counts == dict.fromkeys(range(n), 1.0)


def test_evaluation_batches_have_the_center_crop_of_the_resized_image():
    image = support.jpeg(3, 60, 90)
    source = MemorySource(1)
    source.images = [image]
    element = next(iter(pipeline.evaluation_batches(source, 1, image_size=16)))
    result = element["image"][0].numpy().astype(float)
    pixels = np.asarray(Image.open(io.BytesIO(image))).astype(float)
    side = round(60 * 0.875)
    window = pixels[(60 - side) // 2 :, (90 - side) // 2 :][:side, :side]
    # The decoder may decode at half scale.
    reduced = window[:52, :52].reshape(26, 2, 26, 2, 3).mean(axis=(1, 3))
    expected = augment_reference.resize(reduced, 16, 16)
    assert np.abs(result - expected).mean() < 4
    assert np.abs(result - expected).max() < 25


@pytest.mark.parametrize("kind", ["bad", "undecodable"])
def test_batches_with_a_bad_record_raise_its_file_and_offset(kind):
    source = MemorySource(60, **{kind: {17}})
    order = SampleOrder(60, seed=1)
    with pytest.raises(UserError, match=r"memory, offset 17000: .*--bad_records=skip"):
        labels(train(source, order, Cursor(), (8, 1), 0, 1))
    with pytest.raises(UserError, match="offset 17000"):
        list(pipeline.evaluation_batches(source, 8, image_size=8))


@pytest.mark.parametrize("kind", ["bad", "undecodable"])
def test_training_batches_that_skip_bad_records_replace_and_log_them(kind, caplog):
    source = MemorySource(60, **{kind: {17, 18, 44}})
    order = SampleOrder(60, seed=1)
    with caplog.at_level(logging.WARNING):
        runs = [
            train(source, order, Cursor(), (8, 1), rank, 2, epochs=2, bad_records="skip")
            for rank in range(2)
        ]
        labels_of_ranks = [labels(run) for run in runs]
    assert len(labels_of_ranks[0]) == len(labels_of_ranks[1]) == 8
    flat = [
        label for steps in zip(*labels_of_ranks, strict=True) for batch in steps for label in batch
    ]
    examples = order.rank_slice(Cursor(), 128)[0].tolist()
    assert flat == [{17: 19, 18: 19, 44: 45}.get(label, label) for label in examples]
    assert {bad for run in runs for bad in run.bad_records.reasons} == {17, 18, 44}
    assert "memory, offset 44000" in caplog.text


def test_training_batches_skip_an_image_that_another_rank_reports_as_bad():
    # The other rank reports it after this rank has already read the next batches.
    source = MemorySource(60, undecodable={17})
    order = SampleOrder(60, seed=1)
    position = order.rank_slice(Cursor(), 60)[0].tolist().index(17)
    batches = train(
        source, order, Cursor(), (4, 1), 0, 1, bad_records="skip", readers=1, prefetch=1
    )
    elements = iter(batches)
    for _ in range(position // 4):
        next(elements)
    wait_for(lambda: source.reads >= 4 * (position // 4 + 1))
    batches.bad_records.merge_from_ranks([[(17, "reported by another rank")]])
    assert 18 in next(elements)["label"].numpy()
    assert batches.bad_records.replaced_examples == {(0, 17)}


def test_evaluation_batches_give_bad_records_no_weight():
    source = MemorySource(20, bad={3}, undecodable={19})
    batches = pipeline.evaluation_batches(
        source, 8, image_size=8, options=HostOptions(bad_records="skip")
    )
    elements = list(batches)
    assert len(elements) == 3
    weighted = [
        int(label)
        for element in elements
        for label, weight in zip(element["label"].numpy(), element["weight"].numpy(), strict=True)
        if weight
    ]
    assert weighted == [label for label in range(20) if label not in (3, 19)]


def test_training_batches_with_too_many_bad_records_raise():
    source = MemorySource(60, bad=range(10, 20))
    with pytest.raises(UserError, match="max_bad_records=4"):
        labels(
            train(
                source,
                SampleOrder(60),
                Cursor(),
                (8, 1),
                0,
                1,
                bad_records="skip",
                max_bad_records=4,
            )
        )
    with pytest.raises(UserError, match=r"All \d+ records are bad. Check --data_dir"):
        labels(
            train(
                MemorySource(5, bad=range(5)),
                SampleOrder(5),
                Cursor(),
                (2, 1),
                0,
                1,
                bad_records="skip",
            )
        )


def decode_window(content, window, side):
    kind, _, _ = images.decode_header(content)
    branch, scaled = images.plan_decoding(np.array([kind]), np.array([window]), side)
    return images.decode(
        tf.constant(content), tf.constant(branch[0]), tf.constant(scaled[0]), side
    ).numpy()


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_decode_of_jpegs_of_every_color_space_is_close_to_pillow(mode):
    content = support.jpeg(5, 40, 48, mode)
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(float)
    expected = augment_reference.resize(pixels[6:38, 4:36], 20, 20)
    assert np.abs(decode_window(content, (6, 4, 32, 32), 20) - expected).mean() < 4


def test_decode_uses_the_accurate_dct_in_evaluation_and_the_fast_one_in_training():
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    content = images.encode(Image.fromarray(noise), "JPEG", quality=95, subsampling=0)
    expected = np.asarray(Image.open(io.BytesIO(content)))
    source = MemorySource(1)
    source.images = [content]
    (element,) = pipeline.evaluation_batches(source, 1, image_size=16, crop_fraction=1.0)
    np.testing.assert_array_equal(element["image"].numpy()[0], expected)
    whole = {"image_size": 16, "augmentation": "shift"}
    (element,) = pipeline.training_batches(
        source, SampleOrder(1), Cursor(), (1, 1), epochs=1, **whole
    )
    assert 0 < np.abs(element["image"].numpy()[0].astype(int) - expected).max() <= 20


@pytest.mark.parametrize("extent", [(70, 100), (260, 300)])
def test_decode_with_a_reduction_is_close_to_the_mean_of_areas(extent):
    content = support.jpeg(7, 280, 320)
    height, width = extent
    pixels = np.asarray(Image.open(io.BytesIO(content)))[8 : 8 + height, 8 : 8 + width]
    area = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BOX)).astype(float)
    # The window is rounded to blocks, which is up to half an output pixel.
    assert np.abs(decode_window(content, (8, 8, height, width), 32) - area).mean() < 4


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP"])
def test_decode_of_a_large_image_with_fine_stripes_returns_their_mean(form):
    pixels = np.full((256, 256, 3), 200, np.uint8)
    # The mean is 140. Of eight columns, a bilinear resize would use only two.
    pixels[:, np.arange(256) % 8 < 3] = 40
    content = images.encode(Image.fromarray(pixels), form)
    assert np.abs(decode_window(content, (8, 8, 240, 240), 30) - 140.0).max() <= 3


# An image whose metadata contain a smaller image with its own end marker, as cameras write it.
WITH_THUMBNAIL = (
    b"\xff\xd8\xff\xe1"
    + struct.pack(">H", 2 + len(support.jpeg(9)))
    + support.jpeg(9)
    + support.jpeg(8)[2:]
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not a JPEG"),
        (support.jpeg(0)[:-80], "truncated"),
        (support.png(0)[:-80], "truncated"),
        (WITH_THUMBNAIL[:-80], "truncated"),
        (
            b"BM" + struct.pack("<16xii", 20000, -20000),
            "20000 x 20000 = 400,000,000 pixels.*make it smaller",
        ),
        (b"\xff\xd8\xff\xd9", "no frame header"),
    ],
)
def test_decode_header_of_a_damaged_image_raises_with_the_reason(content, reason):
    with pytest.raises(ValueError, match=reason):
        images.decode_header(content)


@pytest.mark.parametrize(
    "content", [support.jpeg(0, 31, 57), support.png(0, 31, 57), WITH_THUMBNAIL]
)
def test_decode_ignores_bytes_after_the_end_of_an_image(content):
    trailing = content + random.Random(1).randbytes(5000)
    assert images.decode_header(trailing) == images.decode_header(content)
    _, height, width = images.decode_header(content)
    np.testing.assert_array_equal(
        decode_window(trailing, (0, 0, height, width), 16),
        decode_window(content, (0, 0, height, width), 16),
    )


def test_read_ahead_limits_follow_from_the_memory():
    small = train(
        SOURCE, SampleOrder(N), Cursor(), (64, 1), 0, 1, memory_bytes=1 << 20, readers=8, prefetch=8
    )
    assert small._builder._read_ahead_limits(64, 8) == (1, 8)
    assert small._builder._read_ahead_limits(4096, 8) == (1, 1)


def test_training_batches_with_a_device_are_copied_to_it_in_advance():
    # Every device takes the same path as a GPU. The data that arrive there must be those of the
    # host.
    order = SampleOrder(32, seed=1)
    source = MemorySource(32)
    plain = list(train(source, order, Cursor(), (8, 1), 0, 1))
    batches = train(source, order, Cursor(), (8, 1), 0, 1, device="/cpu:0")
    copied = list(batches)
    assert len(copied) == len(plain) == 4
    for element, expected in zip(copied, plain, strict=True):
        assert element["image"].device.endswith("CPU:0")
        assert all(
            np.array_equal(element[key], expected[key]) for key in ("image", "label", "seed")
        )
    dataset = batches._latest[2]
    assert [type(dataset).__name__, type(dataset._input_dataset).__name__] == [
        "_PrefetchDataset",
        "_CopyToDeviceDataset",
    ]


class SlowSource(MemorySource):
    """Reads slowly, like distant storage; counts the reads at the same time."""

    def __init__(self, count):
        super().__init__(count)
        self.reading = 0
        self.max_reading = 0
        self._lock = threading.Lock()

    def read_one(self, index):
        with self._lock:
            self.reading += 1
            self.max_reading = max(self.max_reading, self.reading)
        time.sleep(0.02)
        with self._lock:
            self.reading -= 1
        return super().read_one(index)


@pytest.mark.parametrize(("reads", "allowed"), [(1, {1}), (8, set(range(4, 9)))])
def test_training_batches_read_records_at_the_same_time_and_keep_their_order(reads, allowed):
    # Otherwise a batch of 256 takes half a second to read if a read takes 2 ms.
    source = SlowSource(64)
    elements = train(
        source, SampleOrder(64, seed=3), Cursor(), (32, 1), 0, 1, readers=1, reads=reads
    )
    assert (
        np.concatenate(labels(elements)).tolist()
        == SampleOrder(64, seed=3).at(0, np.arange(64)).tolist()
    )
    assert source.max_reading in allowed


def test_example_readers_share_their_threads():
    before = sum(thread.name.startswith("reads") for thread in threading.enumerate())
    # A run of several epochs has as many pipelines.
    for _ in range(5):
        reader = ExampleReader(SOURCE, BadRecords(SOURCE, "fail", 0), reads=4)
        assert len(reader.read(np.arange(8))[0]) == 8
    assert sum(thread.name.startswith("reads") for thread in threading.enumerate()) <= before + 4
