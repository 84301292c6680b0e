import numpy as np
import pytest

from hybrid_imagenet.numerics import tuning_split


def test_the_split_is_a_partition_that_the_seed_draws():
    stays, held = tuning_split.split(10, 60)
    assert (len(stays), len(held)) == (50, 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([stays, held])), np.arange(60))
    np.testing.assert_array_equal(tuning_split.split(10, 60)[1], held)
    assert held.tolist() == [2, 14, 18, 27, 35, 39, 43, 51, 53, 56]  # a study goes on with the same images
    others = [tuning_split.split(10, 60, seed)[1].tolist() for seed in range(1, 50)]
    assert len({tuple(other) for other in others}) == 49
    assert np.bincount(np.concatenate(others), minlength=60).min() > 0  # no image is always trained on


def test_a_fraction_is_one_of_the_images():
    assert tuning_split.held_out(0.1, 60000) == 6000
    assert tuning_split.held_out(10000, 60000) == 10000
    assert tuning_split.held_out(0, 60000) == 0
    assert len(tuning_split.split(0.25, 30)[1]) == 8


def test_the_choice_is_spread_over_the_set():
    _, held = tuning_split.split(10000, 60000)
    counts = np.bincount(held // 6000, minlength=10)
    assert counts.min() > 900  # 1,000 expected, standard deviation 27
    assert counts.max() < 1100


@pytest.mark.parametrize(
    ("amount", "words"), [(60, "60 of 60"), (61, "61 of 60"), (1.5, "1.5 is neither"), (0.001, "0 of 60")]
)
def test_splits_that_leave_nothing(amount, words):
    with pytest.raises(ValueError, match=words):
        tuning_split.held_out(amount, 60)
