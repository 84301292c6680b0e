"""Skipped steps, merged statistics and exact metrics between real ranks."""

import numpy as np
import pytest

from tests.ranks import results
from tests.references.moments_reference import population_moments

CODE = """
import numpy as np
from hybrid_imagenet import comm
c = comm.start(comm.Settings(compression="fp16"))
import keras, tensorflow as tf
from hybrid_imagenet import optimizers
from hybrid_imagenet.training.callbacks.batch_norm import BatchNormSync
from hybrid_imagenet.training.callbacks.nan_guard import WeightCheck
from hybrid_imagenet.errors import NumericsError
from hybrid_imagenet.models.normalization import BatchNormalization
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.loss_scale import LossScale

w = keras.Variable(np.zeros(3, np.float32), name="w")
inner = optimizers.create("sgd", weight_decay=0.0, learning_rate=1.0, momentum=0.0)
optimizer = DistributedOptimizer(inner, c, LossScale(1024.0, dynamic=True))
optimizer.build([w])
@tf.function(autograph=False)
def step(grad):
    optimizer.apply([optimizer.scale_loss(grad)])
trail = []
# Finite everywhere; infinite on the last rank only; 60 * 1024 fits FP16 as a mean but not as a sum over ranks.
for mine in (1.0 + c.rank, np.inf if c.rank == c.size - 1 else 1.0, 60.0):
    step(tf.constant([mine, 0.0, 1e-6], tf.float32))
    trail.append([*w.numpy().tolist(), float(optimizer.loss_scale.scale.numpy()), int(inner.iterations.numpy())])

layer = BatchNormalization(mode="last")
layer.build([None, None, None, 2])
images = np.random.default_rng(c.rank).normal(c.rank, 1 + c.rank, (4, 3, 3, 2)).astype(np.float32)
layer(tf.constant(images), training=True)
BatchNormSync(c.allreduce_sum, c.size, [(layer.moving_mean, layer.moving_variance)]).on_test_begin()
statistics = [layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()]

named = ""
v = keras.Variable(np.full(4, 1.0 + (c.rank == 1) * 1e-6, np.float32))
try:
    WeightCheck(c.allgather_object, [v]).on_epoch_end(0, {})
except NumericsError as error:
    named = str(error)
report([trail, statistics, named])
"""


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    return results(request.param, CODE)


def test_a_step_is_taken_or_skipped_by_all_ranks_together(ranks):
    size = len(ranks)
    trails = [trail for trail, _, _ in ranks]
    assert all(trail == trails[0] for trail in trails)
    taken, skipped, large = trails[0]
    assert taken[0] == -(1 + size) / 2  # the mean of 1 .. size
    assert taken[2] == pytest.approx(-1e-6, rel=1e-3)  # 1024e-6 / N survives in FP16
    assert (taken[3:], skipped[3:]) == ([1024.0, 1], [512.0, 1])
    assert skipped[:3] == taken[:3]
    assert large[0] == taken[0] - 60
    assert large[4] == 2


def test_statistics_are_those_of_all_ranks_images(ranks):
    size = len(ranks)
    images = [np.random.default_rng(r).normal(r, 1 + r, (4, 3, 3, 2)).astype(np.float32) for r in range(size)]
    for _, (mean, variance), _ in ranks:
        for channel in range(2):
            parts = [part[..., channel].ravel().tolist() for part in images]
            np.testing.assert_allclose([mean[channel], variance[channel]], population_moments(parts), rtol=2e-5)


def test_the_rank_that_differs_is_named_on_every_rank(ranks):
    if len(ranks) == 2:
        assert all("differ" in named for _, _, named in ranks)
    else:
        assert all("weights of rank 1 differ" in named for _, _, named in ranks)
