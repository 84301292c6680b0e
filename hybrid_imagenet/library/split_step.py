"""Lets XLA compile forward and backward of Keras's training step, with the reduction over ranks
outside.
"""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.comm import process
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer

_log = logging.getLogger(__name__)


class SplitCompiledStep(keras.callbacks.Callback):
    """Makes the training function of a model that is compiled with `jit_compile`, which "auto"
    means on GPUs.

    Keras would compile the whole step, and Horovod has no operations for XLA. Here Keras's own
    `train_step` runs compiled up to its gradients, and reduction and update follow outside. A
    `train_step` of one's own may need the updated weights after the gradients: it runs without XLA,
    which is said once. Validation and prediction stay compiled.
    """

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        stock = compiled_model.trains_as_keras(model)
        made = getattr(model.train_function, "reduces_outside", False)
        if (
            not model.jit_compile
            or made
            or (stock and not isinstance(model.optimizer, DistributedOptimizer))
        ):
            return
        if not stock and process.rank() == 0:
            _log.warning(
                "jit_compile: the model's own train_step runs without XLA, so that it sees the"
                " updated weights"
            )
        if stock:
            model.train_step = _split(model, model.optimizer)
        model.jit_compile = False
        try:
            model.make_train_function(force=True)
            model.train_function.reduces_outside = True
        finally:
            model.jit_compile = True
            if stock:
                del model.train_step


def _split(model: keras.Model, optimizer: DistributedOptimizer) -> Any:
    step = model.train_step

    @tf.function(jit_compile=True, autograph=False, reduce_retracing=True)
    def compiled(data: Any) -> tuple[Any, list[tf.Tensor]]:
        with optimizer.defer_update() as deferred:
            logs = step(data)
        return logs, deferred.gradients

    def train_step(data: Any) -> Any:
        logs, gradients = compiled(data)
        optimizer.accumulate_or_update(gradients)
        return logs

    return train_step
