"""The order of examples and the random numbers of each example."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_imagenet.order import sampling
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from tests.references import sampling_reference


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 17, 1003])
def test_sample_order_at_equals_the_reference_permutation(n):
    for epoch in (0, 5):
        actual = SampleOrder(n, seed=11).at(epoch, np.arange(n))
        assert actual.tolist() == [sampling_reference.example_at(p, n, 11, epoch) for p in range(n)]
        assert sorted(actual) == list(range(n))


def test_sample_order_of_four_has_all_permutations_equally_often():
    counts = collections.Counter(
        tuple(SampleOrder(4).at(epoch, np.arange(4))) for epoch in range(6000)
    )
    expected = 6000 / 24
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 24
    # A chi-square variable with 23 degrees of freedom exceeds this with probability 0.1 %.
    assert chi_square < 49.7


def test_sample_order_differs_between_seeds_and_epochs():
    orders = {
        tuple(SampleOrder(50, seed).at(epoch, np.arange(50)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


@given(
    st.integers(1, 300),
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=12
    ),
)
@settings(max_examples=100, deadline=None)
def test_sample_order_gives_each_example_once_per_epoch(n, steps):
    order = SampleOrder(n, seed=3)
    cursor = Cursor()
    examples = []
    # The number of ranks and the batch change at every step.
    for size, batch, accumulation in steps * 3:
        count = size * batch * accumulation
        slices = [order.rank_slice(cursor, count, rank, size)[0] for rank in range(size)]
        assert np.concatenate(slices).tolist() == order.rank_slice(cursor, count)[0].tolist()
        examples += np.concatenate(slices).tolist()
        cursor = order.advance(cursor, count)
    assert cursor == Cursor(*divmod(len(examples), n))
    for start in range(0, len(examples) - n + 1, n):
        assert sorted(examples[start : start + n]) == list(range(n))


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.integers(0, 30),
    st.integers(0, 199),
)
@settings(max_examples=200, deadline=None)
def test_advance_by_many_batches_equals_many_advances_by_one(n, count, batches, offset):
    order = SampleOrder(n)
    count = min(count, n)
    start = Cursor(2, offset % n)
    cursor = start
    for _ in range(batches):
        cursor = order.advance(cursor, count)
    assert order.advance(start, count, batches) == cursor


def test_sample_order_counts_batches_that_begin_in_the_epoch():
    order = SampleOrder(10)
    assert [order.batches_in_epoch(4, offset) for offset in (0, 2, 9)] == [3, 2, 1]
    assert order.advance(Cursor(), 4, 3) == Cursor(1, 2)
    assert order.position(Cursor(1, 2)) == 1.2


def test_rank_slice_of_a_small_dataset_spans_several_epochs():
    examples, epochs = SampleOrder(3, seed=5).rank_slice(Cursor(0, 2), 8)
    assert epochs.tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert sorted(examples[1:4]) == sorted(examples[4:7]) == [0, 1, 2]


def test_rank_slice_without_shuffling_keeps_the_stored_order():
    assert SampleOrder(5, shuffle=False).rank_slice(Cursor(0, 3), 4)[0].tolist() == [3, 4, 0, 1]


def test_sample_order_without_examples_is_rejected():
    with pytest.raises(ValueError, match="num_examples=0"):
        SampleOrder(0)


def test_seeds_depend_on_each_of_seed_epoch_and_example():
    pairs = {
        tuple(sampling.seeds(seed, np.array([epoch]), np.array([example]))[0])
        for seed in range(4)
        for epoch in range(4)
        for example in range(4)
    }
    assert len(pairs) == 64


def test_uniform_numbers_are_uniform_and_uncorrelated():
    pairs = sampling.seeds(0, np.zeros(20000, np.int64), np.arange(20000))
    draws = sampling.uniforms(pairs, 6)
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    np.testing.assert_allclose(draws.mean(axis=0), 0.5, atol=0.01)
    np.testing.assert_allclose(draws.var(axis=0), 1 / 12, atol=0.002)
    assert np.abs(np.corrcoef(draws.T) - np.eye(6)).max() < 0.03
    np.testing.assert_array_equal(sampling.uniforms(pairs, 2, start=3), draws[:, 3:5])
