"""Programs that the tests of callbacks run on each rank."""

import numpy as np

from hybrid_imagenet import comm
from tests.support import in_process
from tests.training import own_networks


def skip_and_merge() -> list:
    """Takes steps of which some overflow, and merges statistics of a batch normalization."""
    communicator = comm.start(comm.CommunicationSettings())
    return [_steps(communicator), _statistics(communicator)]


def _steps(communicator) -> list:
    import keras
    import tensorflow as tf

    from hybrid_imagenet import optimizers
    from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
    from hybrid_imagenet.optimizers.loss_scale import LossScale

    w = keras.Variable(np.zeros(3, np.float32), name="w")
    inner = optimizers.create("sgd", weight_decay=0.0, learning_rate=1.0, momentum=0.0)
    optimizer = DistributedOptimizer(
        inner,
        compression="fp16",
        loss_scale=LossScale(1024.0, dynamic=True),
        communicator=communicator,
    )
    optimizer.build([w])
    step = tf.function(lambda grad: optimizer.apply([optimizer.scale_loss(grad)]), autograph=False)
    states = []
    # The gradient is finite in the first step and infinite on the last rank in the second. In the
    # third, 60 * 1024 fits FP16 as a mean but not as a sum over ranks.
    for gradient in (
        1.0 + communicator.rank,
        np.inf if communicator.rank == communicator.size - 1 else 1.0,
        60.0,
    ):
        step(tf.constant([gradient, 0.0, 1e-6], tf.float32))
        states.append(
            [
                *w.numpy().tolist(),
                float(optimizer.loss_scale.scale.numpy()),
                int(inner.iterations.numpy()),
            ]
        )
    return states


def _statistics(communicator) -> list:
    import tensorflow as tf

    from hybrid_imagenet.callbacks.batch_norm_statistics import BatchNormStatistics
    from hybrid_imagenet.models.normalization import BatchNormalization

    layer = BatchNormalization(mode="last")
    layer.build([None, None, None, 2])
    images = (
        np.random.default_rng(communicator.rank)
        .normal(communicator.rank, 1 + communicator.rank, (4, 3, 3, 2))
        .astype(np.float32)
    )
    layer(tf.constant(images), training=True)
    BatchNormStatistics(communicator, [(layer.moving_mean, layer.moving_variance)]).synchronize()
    return [layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()]


def train_with_dropout(flags: list) -> list:
    """Runs the program; returns the state of this rank's random numbers."""
    assert in_process.call("hybrid_imagenet.main", flags)[0] == 0
    (state,) = [v for v in own_networks.BUILT[0].non_trainable_variables if "seed" in v.name]
    return state.numpy().tolist()
