"""Tests the number of classes among consecutive images, and the warning if it is low."""

import numpy as np
import pytest

from hybrid_imagenet.data import mixing, pipeline
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.order.shard_order import ShardOrder
from tests.data.support import MemorySource

CLASSES = 20
EACH = 40


def test_expected_classes_agrees_with_random_draws():
    assert mixing.expected_classes(1000) == pytest.approx(226, abs=0.1)
    drawn = np.random.default_rng(0).choice(9, (4000, 16))
    assert mixing.expected_classes(9, 16) == pytest.approx(
        np.mean([len(set(row)) for row in drawn]), rel=0.02
    )


def test_mixing_warning_names_the_remedy_for_a_small_window_over_sorted_files():
    # A thousand classes are in a hundred files.
    labels = np.arange(1000 * 100) // 100
    lines = {}
    for window in (1, 16, 100):
        first = ShardOrder([1000] * 100, window).at(0, np.arange(mixing.MONITORED_IMAGES))
        lines[window] = mixing.mixing_warning(labels[first], 1000, window)
    assert (
        "256 consecutive training images hold 12 classes on average; 226 are expected" in lines[1]
    )
    assert "Set --shuffle_window to more than 1 (0 mixes all images)" in lines[1]
    # A window has about 140 of its 160 classes.
    assert lines[16] is None
    assert lines[100] is None


class SortedSource(MemorySource):
    """Holds one file of 40 images for each class."""

    def __init__(self):
        super().__init__(CLASSES * EACH)
        self.num_classes = CLASSES
        self.class_names = tuple(map(str, range(CLASSES)))
        self.shard_sizes = np.full(CLASSES, EACH)

    def read_one(self, index):
        return super().read_one(index)[0], index // EACH


@pytest.mark.parametrize(
    ("window", "rank", "num_warnings"), [(2, 0, 1), (1, 1, 0), (CLASSES, 0, 0), (0, 0, 0)]
)
def test_training_batches_warn_once_on_the_first_rank_if_classes_are_badly_mixed(
    window, rank, num_warnings, caplog
):
    order = pipeline.example_order(SortedSource(), window, seed=1)
    batches = pipeline.training_batches(
        SortedSource(),
        order,
        Cursor(),
        (32, 1),
        rank,
        rank + 1,
        epochs=6,
        image_size=8,
        augmentation="none",
    )
    assert sum(1 for _ in batches) == 150 // (rank + 1)
    lines = [
        record.message
        for record in caplog.records
        if "consecutive training images" in record.message
    ]
    assert len(lines) == num_warnings
    assert all(
        f"--shuffle_window to more than {window} " in line and "20 are expected" in line
        for line in lines
    )
