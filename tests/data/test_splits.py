"""Tests how images are divided between training, validation and tuning."""

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
def test_validation_mask_has_the_fraction_but_at_least_one_image_on_each_side(
    count, fraction, number
):
    mask = splits.validation_mask(count, fraction)
    assert mask.shape == (count,)
    assert mask.sum() == number


def test_validation_mask_is_reproducible_and_spreads_over_the_class():
    first = splits.validation_mask(1000, 0.2)
    assert np.array_equal(first, splits.validation_mask(1000, 0.2))
    in_each_tenth = first.reshape(10, 100).sum(1)
    # The expected number is 20, with a standard deviation of 4.
    assert in_each_tenth.min() >= 8


def test_split_for_tuning_is_a_partition_that_depends_on_the_seed():
    training, tuning = splits.split_for_tuning(10, 60)
    assert (len(training), len(tuning)) == (50, 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([training, tuning])), np.arange(60))
    np.testing.assert_array_equal(splits.split_for_tuning(10, 60)[1], tuning)
    # These images must not change, so that a study can continue with the same ones.
    assert tuning.tolist() == [2, 14, 18, 27, 35, 39, 43, 51, 53, 56]
    others = [splits.split_for_tuning(10, 60, seed)[1].tolist() for seed in range(1, 50)]
    assert len({tuple(other) for other in others}) == 49
    # Each image is used for tuning with some seed.
    assert np.bincount(np.concatenate(others), minlength=60).min() > 0


def test_num_held_out_is_a_fraction_or_a_number_of_images():
    assert splits.num_held_out(0.1, 60000) == 6000
    assert splits.num_held_out(10000, 60000) == 10000
    assert splits.num_held_out(0, 60000) == 0
    assert len(splits.split_for_tuning(0.25, 30)[1]) == 8


@pytest.mark.parametrize(
    ("amount", "words"), [(60, "60 of 60"), (61, "61 of 60"), (0.001, "0 of 60")]
)
def test_num_held_out_that_leaves_no_images_raises(amount, words):
    with pytest.raises(ValueError, match=words):
        splits.num_held_out(amount, 60)
