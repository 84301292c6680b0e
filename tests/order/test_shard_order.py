"""The order that mixes a window of shards at a time."""

import collections

import numpy as np
import pytest

from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.order.shard_order import ShardOrder

# Examples in each shard, 121 in all.
SIZES = [7, 0, 30, 1, 12, 12, 25, 3, 9, 18, 4]
SHARD = np.repeat(np.arange(len(SIZES)), SIZES)


@pytest.mark.parametrize("window", [1, 2, 4, 10, 11, 100])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_shard_order_has_each_example_once_and_few_shards_at_a_time(window, epoch):
    examples = ShardOrder(SIZES, window, seed=3).at(epoch, np.arange(121))
    assert sorted(examples.tolist()) == list(range(121))
    # Shards are listed in the order of their first example.
    order = list(dict.fromkeys(SHARD[examples].tolist()))
    windows = -(-len(SIZES) // window)
    # A shard's examples are in one window, so it ends before the window after the next begins.
    spans = {shard: np.flatnonzero(SHARD[examples] == shard) for shard in order}
    open_at = [
        sum(spans[s][0] <= position <= spans[s][-1] for s in order) for position in range(121)
    ]
    assert max(open_at) <= -(-len(SIZES) // windows)


def test_shard_order_at_gives_any_part_of_an_epoch():
    order = ShardOrder(SIZES, 3, seed=5)
    whole = order.at(2, np.arange(121))
    for part in (np.arange(50, 90), np.array([120, 0, 77])):
        assert order.at(2, part).tolist() == whole[part].tolist()


def test_shard_order_differs_between_epochs_seeds_and_windows():
    orders = [
        tuple(ShardOrder(SIZES, window, seed).at(epoch, np.arange(121)))
        for window in (1, 4)
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == len(orders)


def test_shard_order_begins_with_each_example_equally_often():
    firsts = collections.Counter(
        int(ShardOrder([2, 2, 2], 1, seed).at(0, np.arange(1))[0]) for seed in range(1200)
    )
    assert sorted(firsts) == list(range(6))
    # The bound is five standard deviations.
    assert all(abs(count - 200) < 65 for count in firsts.values())


def test_shards_ahead_contains_the_shards_that_are_read_next():
    order = ShardOrder(SIZES, 3, seed=2)
    for epoch in (0, 1):
        following = np.concatenate(
            [order.at(epoch, np.arange(121)), order.at(epoch + 1, np.arange(121))]
        )
        for offset in range(0, 122, 7):
            ahead = order.shards_ahead(Cursor(epoch, offset))
            needed = set(SHARD[following[offset : offset + 8]].tolist())
            assert needed <= set(ahead)
            assert len(ahead) <= 6
    assert SampleOrder(121).shards_ahead(Cursor()) == ()
