"""Which images a validation got right, on any number of ranks."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import data
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data.batches import HostOptions
from hybrid_imagenet.training.accumulators import SumAccumulator
from hybrid_imagenet.training.evaluation import Validation
from tests.data import test_idx


class OneOf(SingleProcess):
    """A rank among several; sums stay its own."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


class EvenPixel:
    """Finds an image right whose first pixel is even."""

    def __init__(self):
        self.sums = SumAccumulator("sums")

    def __call__(self, batch):
        self.sums.variable.assign_add([0.0, 0.0, 0.0, float(tf.reduce_sum(batch["weight"]))])
        return batch["image"][:, 0, 0, 0] % 2 == 0


@pytest.mark.parametrize(("size", "batch"), [(1, 5), (2, 5), (3, 2), (4, 8)])
def test_each_image_has_its_own_place_on_any_number_of_ranks(tmp_path, size, batch):
    source = data.open_source("fashion_mnist", test_idx.write(tmp_path), "train")
    found = np.zeros(12, int)
    for rank in range(size):
        validation = Validation(
            EvenPixel(),
            source,
            OneOf(rank, size),
            batch=batch,
            image_size=8,
            crop_fraction=1.0,
            options=HostOptions(readers=1, prefetch=1),
            by_image=True,
        )
        assert validation.right is None
        validation.run()
        assert validation.right.dtype == bool
        found += validation.right
    np.testing.assert_array_equal(found, test_idx.TRAIN[:, 0, 0] % 2 == 0)
