"""Splits the vectors in which a communicator returns gradients."""

from hybrid_imagenet.optimizers.layout import Layout


def means(reduce, grads, names):
    """Returns the means over ranks that `reduce` computes, in the order and shapes of `grads`."""
    import tensorflow as tf

    packed = reduce(grads, names)
    members = [i for bucket in packed.members for i in bucket]
    by_index = Layout([grad.shape for grad in grads], members).unpack_buckets(packed)
    return [by_index.get(i, tf.zeros(grad.shape)) for i, grad in enumerate(grads)]
