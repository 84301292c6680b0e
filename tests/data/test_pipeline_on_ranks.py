"""Every example once per epoch over real ranks, also when a run stops and goes on with another
number of them.
"""

import itertools

import pytest

from tests.data import programs

ALL = 10**6


def read(pool, batch, start=(0, 0), steps=ALL):
    """The labels of all ranks in the order of the stream; a label is the number of its example."""
    parts = pool.call(programs.labels, batch, start, steps)
    assert len({len(part) for part in parts}) == 1, "as many steps on every rank"
    return list(
        itertools.chain.from_iterable(
            itertools.chain.from_iterable(step) for step in zip(*parts, strict=True)
        )
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_of_1003_examples_is_read_once(pools, ranks):
    labels = read(pools[ranks], 16)
    assert sorted(labels[:1003]) == list(range(1003))
    # The rest of the last batch begins the next epoch.
    assert len(labels) == -(-1003 // (16 * ranks)) * 16 * ranks


def test_a_restart_on_other_ranks_reads_the_remaining_examples(pools):
    before = read(pools[4], 12, steps=5)
    after = read(pools[2], 10, start=(0, len(before)))
    assert len(before) == 240
    assert sorted((before + after)[:1003]) == list(range(1003))
