import numpy as np
import pytest

from hybrid_imagenet.data import splits


@pytest.mark.parametrize(
    ("count", "fraction", "number"),
    [
        (0, 0.2, 0),
        (1, 0.2, 0),
        (2, 0.2, 1),
        (2, 0.9, 1),
        (10, 0.2, 2),
        (10, 0.01, 1),
        (10, 0.9, 9),
        (1300, 0.1, 130),
    ],
)
def test_as_many_as_the_fraction_says_but_at_least_one_on_each_side(count, fraction, number):
    chosen = splits.of_class(count, fraction)
    assert chosen.shape == (count,)
    assert chosen.sum() == number


def test_always_the_same_ones_spread_over_the_class():
    first = splits.of_class(1000, 0.2)
    assert np.array_equal(first, splits.of_class(1000, 0.2))
    in_each_tenth = first.reshape(10, 100).sum(1)
    assert in_each_tenth.min() >= 8  # 20 are expected, with a standard deviation of 4


def test_the_split_is_a_partition_that_the_seed_draws():
    stays, held = splits.split(10, 60)
    assert (len(stays), len(held)) == (50, 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([stays, held])), np.arange(60))
    np.testing.assert_array_equal(splits.split(10, 60)[1], held)
    assert held.tolist() == [
        2,
        14,
        18,
        27,
        35,
        39,
        43,
        51,
        53,
        56,
    ]  # a study goes on with the same images
    others = [splits.split(10, 60, seed)[1].tolist() for seed in range(1, 50)]
    assert len({tuple(other) for other in others}) == 49
    assert (
        np.bincount(np.concatenate(others), minlength=60).min() > 0
    )  # no image is always trained on


def test_a_fraction_is_one_of_the_images():
    assert splits.held_out(0.1, 60000) == 6000
    assert splits.held_out(10000, 60000) == 10000
    assert splits.held_out(0, 60000) == 0
    assert len(splits.split(0.25, 30)[1]) == 8


@pytest.mark.parametrize(
    ("amount", "words"), [(60, "60 of 60"), (61, "61 of 60"), (0.001, "0 of 60")]
)
def test_splits_that_leave_nothing(amount, words):
    with pytest.raises(ValueError, match=words):
        splits.held_out(amount, 60)
