"""A small model in float8, and its training."""

import keras
import numpy as np

import hybrid_imagenet as hi
from tests.library.models import loss, vectors

BATCHES = 4


def batches():
    """Returns BATCHES pairs of inputs [8, 6], which grow from example to example, and classes."""
    x, y = vectors(8 * BATCHES)
    x *= np.linspace(1, 3, len(x), dtype=np.float32)[:, None]
    return list(zip(np.split(x, BATCHES), np.split(y, BATCHES), strict=True))


def compiled(optimizer, *, use_bias=True):
    """Returns one dense layer in float8."""
    init = keras.initializers.GlorotUniform(1)
    layer = keras.layers.Dense(3, name="scores", use_bias=use_bias, kernel_initializer=init)
    model = keras.Sequential([keras.Input((6,)), layer], name="network")
    model.quantize("float8")
    model.compile(optimizer, loss())
    return model


def train(model):
    """Takes a step with each of the batches, and returns the model."""
    for x, y in batches():
        model.train_on_batch(x, y)
    return model


def fit(rank=0, size=1, steps=None):
    """Trains on this rank's part of three batches with `fit`.

    Args:
      rank: number of this rank.
      size: number of ranks.
      steps: micro-batches per update.

    Returns:
      The values of each trainable variable and of its sum of micro-batches, flat, by name.
    """
    optimizer = hi.DistributedOptimizer(
        "sgd", compression="none", gradient_accumulation_steps=steps
    )
    # Keras rounds the gradient of a bias to BF16, on each rank before the mean over ranks.
    model = compiled(optimizer, use_bias=False)
    parts = [(x[rank::size], y[rank::size]) for x, y in batches()[:3]]
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    callbacks = hi.callbacks.default_callbacks() if size > 1 else None
    model.fit(x, y, 8 // size, verbose=0, shuffle=False, callbacks=callbacks)
    hi.broadcast_model(model)
    values = {v.name: v.numpy().ravel().tolist() for v in model.trainable_variables}
    for total in model.optimizer.accumulator.sums:
        values[total.name] = total.numpy().ravel().tolist()
    return values


def fit_on_rank():
    """Returns the results of `fit` with and without accumulation on this rank."""
    from tests.library.programs import ranks

    with ranks():
        return [fit(hi.rank(), hi.size(), steps) for steps in (None, 2)]
