"""Programs and oracles for layers that normalize over all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import synchronized_batch_norm
from tests.comm.programs import message
from tests.library.programs import ranks

# Examples in the batch of all ranks together.
BATCH = 8

# Each value holds the shape without the batch, the arguments of the layer, whether there is a mask,
# and the number of calls in a step.
LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any], bool, int]] = {
    "images": ((3, 2, 5), {"momentum": 0.75}, False, 1),
    "channels first": ((5, 3, 2), {"axis": 1}, False, 1),
    "neither scale nor offset": ((5,), {"scale": False, "center": False}, False, 1),
    "masked": ((4, 5), {}, True, 1),
    "bfloat16": ((3, 2, 5), {"dtype": "mixed_bfloat16"}, False, 1),
    "called twice": ((5,), {}, False, 2),
}


def cuts(size: int) -> list[int]:
    """Returns the start of each rank's batch and the end of the last; lengths differ."""
    return {1: [0, 8], 2: [0, 3, 8], 4: [0, 1, 2, 5, 8]}[size]


def normalized(name: str, first: int, last: int, connect: bool) -> dict[str, list[float]]:
    """Returns outputs, gradients and statistics of one layer for a part of the batch.

    Args:
      name: Key of `LAYERS`.
      first: First example of the part.
      last: The example after the part.
      connect: Whether the layer is connected to the ranks.
    """
    shape, arguments, has_mask, calls = LAYERS[name]
    random = np.random.default_rng(3)
    x = random.normal(1.0, 2.0, (BATCH, *shape)).astype(np.float32)
    slopes = random.normal(size=x.shape).astype(np.float32)
    mask = random.uniform(size=x.shape[:-1]) < 0.7
    # Ranks 0 and 1 of 4 have no position that counts.
    mask[:2] = False
    layer = keras.layers.BatchNormalization(synchronized=True, **arguments)
    model = keras.Sequential([keras.Input(shape), layer])
    for variable in layer.trainable_variables:
        variable.assign(random.uniform(0.5, 1.5, variable.shape))
    if connect:
        synchronized_batch_norm.connect(model)

    @tf.function
    def step(x: tf.Tensor, slopes: tf.Tensor, mask: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = x
            for _ in range(calls):
                outputs = layer(
                    tf.cast(outputs, layer.compute_dtype),
                    training=True,
                    mask=mask if has_mask else None,
                )
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) * slopes)
        variables = [variable.value for variable in layer.trainable_variables]
        return outputs, tape.gradient(loss, [x, *variables])

    part = slice(first, last)
    outputs, (dx, *gradients) = step(*(tf.constant(value[part]) for value in (x, slopes, mask)))
    return {
        "outputs": _to_list(outputs),
        "dx": _to_list(dx),
        "gradients": [value for gradient in gradients for value in _to_list(gradient)],
        "statistics": _to_list(layer.moving_mean) + _to_list(layer.moving_variance),
    }


def _to_list(value: Any) -> list[float]:
    return np.ravel(tf.cast(tf.convert_to_tensor(value), tf.float64)).tolist()


def on_rank() -> dict[str, dict[str, list[float]]]:
    """Returns the results of all `LAYERS` for this rank's part of the batch."""
    with ranks():
        boundaries = cuts(hi.size())
        part = (boundaries[hi.rank()], boundaries[hi.rank() + 1])
        # Keras then gives layers another name on each rank.
        for _ in range(hi.rank()):
            keras.layers.BatchNormalization()
        return {name: normalized(name, *part, connect=True) for name in LAYERS}


def rejected() -> dict[str, Any]:
    """Returns errors of steps that XLA compiles, and of unsupported layers."""
    x = np.ones((2, 3), np.float32)

    def model(layer: keras.layers.Layer) -> keras.Sequential:
        return keras.Sequential([keras.Input((3,)), layer])

    def norm(**arguments: Any) -> keras.layers.BatchNormalization:
        return keras.layers.BatchNormalization(synchronized=True, name="bn", **arguments)

    class Own(keras.layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=training, mask=mask)

    def fit(layer: keras.layers.Layer, **compiled: Any) -> None:
        compiled_model = model(layer)
        compiled_model.compile(hi.DistributedOptimizer("sgd"), "mse", **compiled)
        compiled_model.fit(x, x, verbose=0, callbacks=hi.callbacks.default_callbacks())

    def loop() -> None:
        trained = model(norm())
        hi.broadcast_model(trained)
        step = tf.function(lambda: trained(x, training=True), autograph=False, jit_compile=True)
        step()

    def converted() -> str:
        gpu = mock.Mock(device_type="GPU")
        trained = hi.synchronize_batch_norm(model(keras.layers.BatchNormalization()))
        with mock.patch.object(tf.config, "list_physical_devices", lambda kind=None: [gpu]):
            trained.compile(hi.DistributedOptimizer("sgd"), "mse")
        trained.fit(x, x, verbose=0, callbacks=hi.callbacks.default_callbacks())
        return str(trained.jit_compile)

    with ranks():
        return {
            "fit": message(lambda: fit(norm(), jit_compile=True)),
            "loop": message(loop),
            "renorm": message(lambda: fit(norm(renorm=True))),
            "subclass": message(lambda: fit(Own(synchronized=True, name="bn"))),
            "converted, on a GPU": converted(),
        }


def retraced() -> list[list[float]]:
    """Returns moving means after a `fit` without synchronization, and after one with it."""
    with ranks():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile(hi.DistributedOptimizer("sgd"), "mse")
        x = np.full((2, 3), hi.rank(), np.float32)
        model.fit(x, x, verbose=0)
        alone = layer.moving_mean.numpy().tolist()
        hi.synchronize_batch_norm(model)
        model.fit(x, x, verbose=0, callbacks=hi.callbacks.default_callbacks())
        return [alone, layer.moving_mean.numpy().tolist()]
