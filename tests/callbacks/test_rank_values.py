"""Values of all ranks for a checkpoint, with one rank that is real."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.callbacks import rank_values
from hybrid_imagenet.comm import SingleProcess


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


def test_equal_values_of_ranks_are_compared_by_one_digest():
    sent = []

    def allgather(value):
        sent.append(value)
        return [value, value]

    ranks = mock.Mock(size=2, allgather_object=allgather)
    variables = {str(number): keras.Variable(np.ones(3)) for number in range(5)}
    assert rank_values.gather_differing(variables, ranks) == {}
    assert len(sent) == 1
    assert isinstance(sent[0], str)


def test_states_of_recurrent_layers_are_restored_only_for_the_same_batch():
    def model(batch):
        return keras.Sequential(
            [keras.Input(batch_shape=(batch, 3, 2)), keras.layers.LSTM(4, stateful=True)]
        )

    trained = model(2)
    trained(np.ones((2, 3, 2), np.float32))
    states = rank_values.recurrent_states(trained)
    arrays = rank_values.gather(
        {name: state.numpy() for name, state in states.items()}, SingleProcess()
    )
    same = model(2)
    assert rank_values.restore_recurrent_states(same, arrays, SingleProcess())
    for name, state in rank_values.recurrent_states(same).items():
        assert np.any(state.numpy())
        np.testing.assert_array_equal(state.numpy(), states[name].numpy())
    larger = model(3)
    assert not rank_values.restore_recurrent_states(larger, arrays, SingleProcess())
    assert not rank_values.restore_recurrent_states(larger, {}, SingleProcess())
    for state in rank_values.recurrent_states(larger).values():
        assert not np.any(state.numpy())
    # A model without such layers has nothing to restore.
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert rank_values.restore_recurrent_states(plain, {}, SingleProcess())
