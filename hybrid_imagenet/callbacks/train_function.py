"""Makes the training function of `fit`, if Keras's own would not work or would be slow.

Two cases need another one than Keras makes:

* The model is compiled with `jit_compile`, which "auto" means on GPUs. Keras would compile the
  whole step with XLA, but Horovod has no operations for XLA. Here Keras's `train_step` is compiled
  up to its gradients, and reduction and update follow outside.
* Gradients are accumulated. A branch inside the step would make the host wait for a GPU's
  counter at every micro-batch. Here the host counts micro-batches and calls one of two traced
  functions: one that adds gradients to the sums, and one that updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.callbacks import synchronized_batch_norm
from hybrid_imagenet.comm import process
from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.optimizers.accumulation import MicroBatchCounter, MicroBatchUse
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.resilience.step_requests import NUM_REQUESTS

_log = logging.getLogger(__name__)

Step = Callable[[Any], Any]


class TrainFunction(keras.callbacks.Callback):
    """Makes the training function of a model before `fit` uses it.

    A `train_step` of yours may need the updated weights after the gradients, so it runs without
    XLA, and a warning says that once. Validation and prediction stay compiled.
    """

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        # Before `BackupAndRestore` builds the optimizer, on rank 0 only: what the optimizer does
        # with a variable depends on the layer.
        for distributed in compiled_model.distributed(model).values():
            distributed.attach(model)
        if process.size() > 1:
            _sum_requests(model)
        synchronized_batch_norm.reject_xla(model)
        synchronized_batch_norm.connect(model)
        is_ours = getattr(model.train_function, "made_by_hybrid_imagenet", False)
        if is_ours or model.run_eagerly:
            return
        optimizer = model.optimizer
        trains_as_keras = compiled_model.trains_as_keras(model)
        if not trains_as_keras:
            if model.jit_compile:
                _warn_of_step_without_xla()
                _set_train_function(model, model.train_step)
        elif isinstance(optimizer, DistributedOptimizer):
            # The host counts micro-batches, so that it can choose the function of each. A function
            # of several steps needs a branch.
            counter = optimizer.micro_batches if model.steps_per_execution == 1 else None
            if not (model.jit_compile or counter is not None):
                return
            step = model.train_step
            if model.jit_compile:
                step = split_step(step, optimizer)
            if counter is not None:
                _set_host_chosen_functions(model, step, counter)
            else:
                _set_train_function(model, step)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the host read the counter again, because a callback may have restored it."""
        reset = getattr(self.model.train_function, "reset_count", None)
        if reset is not None:
            reset()


def _sum_requests(model: keras.Model) -> None:
    """Makes each update sum the requests of all ranks to save or to stop, see `Checkpoint`.

    All optimizers of a model share one sum, because some may make no update for many steps.
    """
    request_sum = compiled_model.request_sum(model) or RequestSum(NUM_REQUESTS)
    for optimizer in compiled_model.distributed(model).values():
        if optimizer.reducer.request_sum is not request_sum:
            optimizer.reducer.request_sum = request_sum
            # An earlier `fit` has traced this function without the sum.
            model.train_function = None


def split_step(step: Step, optimizer: DistributedOptimizer) -> Step:
    """Returns a training step that XLA compiles up to its gradients.

    Args:
      step: Keras's own `train_step` of the model.
      optimizer: Optimizer of the model.
    """

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


def step_for(micro_batch: MicroBatchUse, step: Step, counter: MicroBatchCounter) -> Step:
    """Returns a training step that is traced for one kind of micro-batch."""

    def train_step(data: Any) -> Any:
        with counter.traced_for(micro_batch):
            return step(data)

    return train_step


def _set_train_function(model: keras.Model, step: Step) -> None:
    """Sets the model's training function, made of a step that Keras must not compile."""
    model.train_function = _keras_function(model, step)
    model.train_function.made_by_hybrid_imagenet = True


def _set_host_chosen_functions(model: keras.Model, step: Step, counter: MicroBatchCounter) -> None:
    """Sets a training function in which the host chooses between two traced functions."""
    add = _keras_function(model, step_for(MicroBatchUse.ADD, step, counter))
    update = _keras_function(model, step_for(MicroBatchUse.UPDATE, step, counter))
    # Micro-batches so far, as in the optimizer's counter; None until it is read.
    count: int | None = None

    def train_function(iterator: Any) -> Any:
        nonlocal count
        if count is None:
            count = counter.read()
        is_last = (count + 1) % counter.steps == 0
        logs = (update if is_last else add)(iterator)
        # At the end of the data, the call above raises an exception, and nothing is counted.
        count += 1
        return logs

    def reset_count() -> None:
        nonlocal count
        count = None

    function: Any = train_function
    function.made_by_hybrid_imagenet = True
    function.reset_count = reset_count
    model.train_function = function


def _keras_function(model: keras.Model, step: Step) -> Any:
    """Returns the training function that Keras makes of a step, without XLA around the step."""
    jit_compile = model.jit_compile
    model.train_step = step
    model.jit_compile = False
    try:
        model.make_train_function(force=True)
        return model.train_function
    finally:
        model.jit_compile = jit_compile
        del model.train_step


def _warn_of_step_without_xla() -> None:
    if process.rank() == 0:
        _log.warning(
            "jit_compile: the model's own train_step runs without XLA, so that it sees the"
            " updated weights"
        )
