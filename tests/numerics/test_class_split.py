"""The images of a class that are validated."""

import numpy as np
import pytest

from hybrid_imagenet.numerics import class_split


@pytest.mark.parametrize(
    ("count", "fraction", "number"),
    [(0, 0.2, 0), (1, 0.2, 0), (2, 0.2, 1), (2, 0.9, 1), (10, 0.2, 2), (10, 0.01, 1), (10, 0.9, 9), (1300, 0.1, 130)],
)
def test_as_many_as_the_fraction_says_but_at_least_one_on_each_side(count, fraction, number):
    chosen = class_split.held_out(count, fraction)
    assert chosen.shape == (count,)
    assert chosen.sum() == number


def test_always_the_same_ones_spread_over_the_class():
    first = class_split.held_out(1000, 0.2)
    assert np.array_equal(first, class_split.held_out(1000, 0.2))
    in_each_tenth = first.reshape(10, 100).sum(1)
    assert in_each_tenth.min() >= 8  # 20 are expected, with a standard deviation of 4
