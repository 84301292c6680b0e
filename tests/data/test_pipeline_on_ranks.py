"""Tests on real ranks that every example is read once per epoch, also after a restart.

The number of ranks may be another one after the restart.
"""

import itertools

import pytest

from tests.data import programs

ALL = 10**6


def read(pool, batch, start=(0, 0), steps=ALL):
    """Returns the labels of all ranks in the order of the stream.

    A label is the number of its example.
    """
    labels_of_ranks = pool.call(programs.labels, batch, start, steps)
    assert len({len(labels) for labels in labels_of_ranks}) == 1, "equal steps on all ranks"
    return list(
        itertools.chain.from_iterable(
            itertools.chain.from_iterable(step) for step in zip(*labels_of_ranks, strict=True)
        )
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_batches_on_ranks_have_each_of_1003_examples_once(pools, ranks):
    labels = read(pools[ranks], 16)
    assert sorted(labels[:1003]) == list(range(1003))
    # The rest of the last batch begins the next epoch.
    assert len(labels) == -(-1003 // (16 * ranks)) * 16 * ranks


def test_training_batches_after_a_restart_on_other_ranks_have_the_remaining_examples(pools):
    before = read(pools[4], 12, steps=5)
    after = read(pools[2], 10, start=(0, len(before)))
    assert len(before) == 240
    assert sorted((before + after)[:1003]) == list(range(1003))
