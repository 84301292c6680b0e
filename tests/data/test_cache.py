"""Tests the cache of encoded images in memory."""

import numpy as np

from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.wrappers import CachedSource
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from tests.data.support import MemorySource


def pixels_and_labels(source):
    order = SampleOrder(source.num_examples, seed=1)
    batches = pipeline.training_batches(
        source, order, Cursor(), (10, 1), epochs=2, image_size=12, augmentation="inception"
    )
    return [element["image"].numpy() for element in batches], [
        element["label"].numpy() for element in batches
    ]


def test_cached_source_reads_each_image_once_and_changes_nothing():
    plain = MemorySource(40)
    source = MemorySource(40)
    cached = CachedSource(source, 1 << 30)
    assert cached.read(range(40))[1].tolist() == list(range(40))
    images, labels = pixels_and_labels(cached)
    expected_images, expected_labels = pixels_and_labels(plain)
    np.testing.assert_array_equal(labels, expected_labels)
    np.testing.assert_array_equal(images, expected_images)
    assert source.reads == 40


def test_cached_source_uses_at_most_its_memory():
    source = MemorySource(40)
    memory_bytes = sum(len(image) for image in source.images[:10])
    cached = CachedSource(source, memory_bytes)
    for _ in range(3):
        cached.read(range(40))
    assert source.reads == 40 + 2 * 30


def test_cached_source_counts_an_image_that_two_threads_read_once():
    source = MemorySource(2)
    cached = CachedSource(source, sum(map(len, source.images)))
    read = source.read_one

    def read_twice(index):
        source.read_one = read
        # Another thread reads the same image while this one does.
        cached.read_one(index)
        return read(index)

    source.read_one = read_twice
    for index in (0, 1):
        cached.read_one(index)
    before = source.reads
    cached.read_one(1)
    assert source.reads == before
