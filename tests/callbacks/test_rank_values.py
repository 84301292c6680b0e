"""Values of all ranks for a checkpoint, with one rank that is real."""

import numpy as np
import tensorflow as tf

from hybrid_imagenet.callbacks import rank_values


class SecondOfThree:
    """Adds the rows of two other ranks, which have the same values in another order."""

    size = 3
    rank = 1

    def __init__(self):
        self.bytes_sent = 0

    def allreduce_sum(self, tensor, name):
        self.bytes_sent += tensor.numpy().nbytes
        rows = tensor.numpy()
        rows[0] = rows[1]
        rows[2] = rows[1]
        return tf.constant(rows)


def test_gather_keeps_the_bits_of_values_of_all_types_and_sizes():
    values = {
        "zeros": np.array([-0.0, 0.0, np.nan], np.float32),
        "flags": np.array([True, False, True]),
        "scalar": np.array(-7, np.int64),
        "half": np.array([[1.5, -2.0]], np.float16),
        "empty": np.zeros((0, 3), np.float32),
    }
    gathered = rank_values.gather(values, SecondOfThree())
    for name, value in values.items():
        assert gathered[name].dtype == value.dtype
        assert gathered[name].shape == (3, *value.shape)
        for row in gathered[name]:
            assert row.tobytes() == value.tobytes()


def test_gather_sends_the_bytes_of_all_ranks_once():
    communicator = SecondOfThree()
    rank_values.gather({"statistics": np.ones(1000, np.float32)}, communicator)
    assert communicator.bytes_sent == 3 * 4000
