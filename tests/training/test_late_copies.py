"""Copies that are read some steps after they were made."""

import tensorflow as tf

from hybrid_imagenet.training.late_copies import LateCopies


def test_a_copy_is_that_of_two_steps_before_until_it_is_closed():
    count, pair = tf.Variable(0, dtype=tf.int64), tf.Variable([0.0, 0.0])
    copies, seen = LateCopies({"count": count, "pair": pair}, lag=2), []
    for step in range(1, 9):
        count.assign(step)
        pair.assign([step, -step])
        copies.make(step, every=4)
        if step % 4 == 0:
            copies.open(step)
            seen.append((copies.behind, copies.read("count").tolist(), copies.read("pair").tolist()))
            copies.close()
            assert (copies.behind, copies.read("count").tolist()) == (0, [step])
    assert seen == [(2, [2.0], [2.0, -2.0]), (2, [6.0], [6.0, -6.0])]


def test_without_a_copy_the_present_is_read():
    count = tf.Variable(1, dtype=tf.int64)
    copies = LateCopies({"count": count}, lag=2)
    copies.make(2, every=4)
    copies.forget()  # an epoch has ended: the variable begins anew
    count.assign(7)
    copies.open(4)
    assert (copies.behind, copies.read("count").tolist()) == (0, [7.0])


def test_records_closer_than_the_lag_wait_for_the_device():
    count = tf.Variable(1, dtype=tf.int64)
    copies = LateCopies({"count": count}, lag=2)
    for step in (1, 2):
        count.assign(step)
        copies.make(step, every=1)
        copies.open(step)
        assert (copies.behind, copies.read("count").tolist()) == (0, [float(step)])
        copies.close()
