"""Sends the model and the optimizer state of rank 0 to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.callbacks import layer_constants, synchronized_batch_norm
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.models import random_state
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, hyperparameters_of
from hybrid_imagenet.optimizers.kinds import classify
from hybrid_imagenet.order.same_order import check_same_order

# In the scope of one of these, a variable is a set of copies.
_DISTRIBUTING_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)


def broadcast_model(model: keras.Model, communicator: Communicator | None = None) -> None:
    """Sends rank 0's weights, optimizer states and first epoch of `fit` to all ranks.

    Layers with `synchronized=True` normalize over all ranks from then on. Random layers, such as
    dropout, get a different seed on each rank, which follows from that of rank 0. Partial sums of
    gradient accumulation become their mean over ranks, unless rank 0 has restored its own. Arrays
    that are no weights, such as a mask that a layer has drawn by `np.random`, are not sent: rank 0
    logs a warning if they differ.

    The callbacks of `hi.callbacks.default_callbacks()` call it when `fit` starts. In a custom
    training loop, call it on every rank before the first step.

    Example:
      hi.broadcast_model(model)
      for images, labels in dataset:
          train_step(images, labels)

    Args:
      model: A model that has its weights; compiled or not.
      communicator: The connected ranks (default: None, those of this process).

    Raises:
      UserError: If there are several ranks, and the model does not have all its weights yet; on
        all ranks, if they read their data in different orders, a layer cannot be synchronized, or
        the model was built in the scope of a strategy such as `tf.distribute.MirroredStrategy`.
    """
    _reject_strategy(model)
    communicator = communicator or process.communicator()
    check_same_order(communicator)
    if lacks_weights(model) and communicator.size == 1:
        for optimizer in compiled_model.distributed(model).values():
            optimizer.attach(model)
        return
    require_weights(model)
    synchronized_batch_norm.connect(model)
    variables = list(model.weights)
    for optimizer in compiled_model.optimizers(model).values():
        build(model, optimizer, communicator)
        if optimizer.built:
            variables += optimizer.variables
    variables += random_state.random_states(model)
    # Before the broadcast, which makes what `Normalization` has adapted to equal.
    layer_constants.warn_of_different_constants(model, communicator)
    communicator.broadcast_variables([v.value for v in variables])
    communicator.has_broadcast_model = True
    for optimizer in compiled_model.distributed(model).values():
        if optimizer.built and optimizer.average is not None:
            _broadcast_average(optimizer, communicator)
    random_state.set_rank_seeds(model, communicator.rank)
    for layer in private_api.flatten_layers(model):
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            # The layer computes with copies of its weights, which this call renews.
            layer.finalize_state()
    initial_epoch = communicator.broadcast_object(private_api.initial_epoch(model))
    private_api.set_initial_epoch(model, initial_epoch)


def _reject_strategy(model: keras.Model) -> None:
    """Raises SharedError if a strategy of TensorFlow has made the variables of a model."""
    strategy = model.distribute_strategy
    if isinstance(strategy, _DISTRIBUTING_STRATEGIES):
        raise SharedError(
            f"The model {model.name!r} was built in the scope of tf.distribute"
            f".{type(strategy).__name__}, which would distribute it a second time. Remove the"
            " strategy and its scope: each rank has its own GPU, and DistributedOptimizer averages"
            " the gradients over ranks."
        )


def _broadcast_average(optimizer: DistributedOptimizer, communicator: Communicator) -> None:
    """Sends rank 0's moving average to all ranks.

    If no step has updated it and no checkpoint has restored it, it begins at the weights of the
    model: it still has the weights with which the optimizer was built, and others may have been
    loaded since.
    """
    average = optimizer.average
    assert average is not None
    if communicator.broadcast_object(average.follows_weights):
        communicator.broadcast_variables([v.value for v in average.variables])
    else:
        average.restart()


def lacks_weights(model: keras.Model) -> bool:
    """Returns whether the first step of a model would create weights."""
    if not model.weights:
        return True
    layers = private_api.flatten_layers(model, include_self=False)
    is_built = model.built or all(layer.built for layer in layers)
    return not is_built and compiled_model.trains_as_keras(model)


def require_weights(model: keras.Model) -> None:
    """Raises UserError, on all ranks, for a model whose first step would create weights."""
    if lacks_weights(model):
        raise SharedError(
            f"The model {model.name!r} lacks weights that its first step would create, so there is"
            " nothing to broadcast or to restore before it. Give it an Input, or call it on one"
            " batch before fit."
        )


def build(model: keras.Model, optimizer: Any, communicator: Communicator) -> None:
    """Prepares an optimizer for the broadcast of its state; every rank calls it.

    It is built on the same variables as on rank 0. The optimizer of a `train_step` that the user
    wrote may not be built there yet: its first `apply` builds it, with the right variables.

    Args:
      model: Model that the optimizer updates.
      optimizer: Optimizer of this package or of Keras.
      communicator: Connects the ranks.
    """
    trains_as_keras = compiled_model.trains_as_keras(model)
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.attach(model)
    elif isinstance(optimizer, GroupedOptimizer) and trains_as_keras and not optimizer.built:
        optimizer.set_kinds(classify(model))
    if trains_as_keras and optimizer is model.optimizer and not optimizer.built:
        optimizer.build(model.trainable_variables)
    indices = communicator.broadcast_object(variable_indices(model, optimizer))
    if indices is not None and not optimizer.built:
        optimizer.build([model.trainable_variables[index] for index in indices])
    if not isinstance(optimizer, DistributedOptimizer):
        return
    optimizer.connect()
    optimizer.average_sums(communicator)
    hyperparameters = hyperparameters_of(optimizer)
    if hyperparameters is not None:
        values = {name: hyperparameters[name] for name in hyperparameters.names}
        set_hyperparameters(optimizer, communicator.broadcast_object(values))


def variable_indices(model: keras.Model, optimizer: Any) -> list[int] | None:
    """Returns the indices of an optimizer's variables among the model's trainable variables.

    Returns:
      None before the optimizer is built.
    """
    if not optimizer.built:
        return None
    index_of = {id(variable): index for index, variable in enumerate(model.trainable_variables)}
    variables = private_api.trainable_variables(optimizer)
    return [index_of[id(variable)] for variable in variables if id(variable) in index_of]


def set_hyperparameters(optimizer: Any, values: Mapping[str, float]) -> None:
    """Sets the hyperparameters of a step.

    Args:
      optimizer: Optimizer of this package, which uses all values that it knows; or of Keras, which
        uses the learning rate only.
      values: Values by name.

    Raises:
      UserError: See `GroupedOptimizer.check_learning_rate`; for a schedule of the user.
    """
    hyperparameters = hyperparameters_of(optimizer)
    if hyperparameters is None:
        getattr(optimizer, "inner", optimizer).learning_rate = values["learning_rate"]
        return
    schedule = getattr(optimizer, "schedule", None)
    is_own_schedule = schedule is not None and not hasattr(schedule, "peak")
    if is_own_schedule and "learning_rate" in values:
        optimizer.inner.check_learning_rate(values["learning_rate"])
    hyperparameters.assign(values)
