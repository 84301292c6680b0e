"""Gradients out of the vectors in which a communicator returns them."""

from hybrid_imagenet.optimizers.layout import Layout


def means(reduce, grads, names):
    """The means over ranks that `reduce` gives of these gradients, float32, in their order and
    shapes.
    """
    import tensorflow as tf

    packed = reduce(grads, names)
    members = [i for bucket in packed.members for i in bucket]
    found = Layout([grad.shape for grad in grads], members).split(packed)
    return [found.get(i, tf.zeros(grad.shape)) for i, grad in enumerate(grads)]
