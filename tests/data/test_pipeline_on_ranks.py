"""Every example once per epoch over real ranks, also when a run stops and goes on with another number of them."""

import itertools

import pytest

from tests.ranks import results

CODE = """
from hybrid_imagenet import comm
c = comm.start()
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder
from tests.data.support import MemorySource
source = MemorySource(1003)
order = SampleOrder(1003, seed=7)
batches = pipeline.training(
    source, order, Cursor(*START), (BATCH, 1), c.rank, c.size, epochs=1, image_size=8, augmentation="none"
)
report([[int(label) for label in element["label"]] for element, _ in zip(batches, range(STEPS))])
"""
ALL = 10**6


def read(ranks, batch, start=(0, 0), steps=ALL):
    """The labels of all ranks in the order of the stream; a label is the number of its example."""
    parts = results(ranks, f"BATCH, START, STEPS = {batch}, {start}, {steps}\n{CODE}")
    assert len({len(part) for part in parts}) == 1, "as many steps on every rank"
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(step) for step in zip(*parts, strict=True)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_of_1003_examples_is_read_once(ranks):
    labels = read(ranks, 16)
    assert sorted(labels[:1003]) == list(range(1003))
    # The rest of the last batch begins the next epoch.
    assert len(labels) == -(-1003 // (16 * ranks)) * 16 * ranks


def test_the_rest_is_read_after_a_restart_on_other_ranks():
    before = read(3, 16, steps=5)
    after = read(2, 10, start=(0, len(before)))
    assert len(before) == 240
    assert sorted((before + after)[:1003]) == list(range(1003))
