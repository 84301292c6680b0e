"""Gives every rank the model and the optimizer state of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.library import compiled_model, synchronized_batch_norm
from hybrid_imagenet.models import random_state
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, hyperparameters_of
from hybrid_imagenet.optimizers.kinds import classify
from hybrid_imagenet.order.same_order import check_same_order


def broadcast_model(model: keras.Model, communicator: Communicator | None = None) -> None:
    """Sends rank 0's weights, optimizer states and first epoch of `fit` to all ranks.

    Layers with `synchronized=True` normalize over all ranks from then on. Random layers, such as
    dropout, get a different seed on each rank, which follows from that of rank 0. Partial sums of
    gradient accumulation become their mean over ranks, unless rank 0 has restored its own. Every
    rank must call it.

    Args:
      model: with weights; compiled or not.
      communicator: the ranks; by default those of this process.

    Raises:
      UserError: if the model of several ranks does not have all its weights yet; on all ranks, if
        data were shared out in different orders, or a layer cannot be synchronized.
    """
    ranks = communicator or process.communicator()
    check_same_order(ranks)
    if lacks_weights(model) and ranks.size == 1:
        for optimizer in compiled_model.distributed(model).values():
            optimizer.attach(model)
        return
    require_weights(model)
    synchronized_batch_norm.connect(model)
    variables = list(model.weights)
    for optimizer in compiled_model.optimizers(model).values():
        build(model, optimizer, ranks)
        if optimizer.built:
            variables += optimizer.variables
    variables += random_state.random_states(model)
    ranks.broadcast_variables([v.value for v in variables])
    random_state.set_rank_seeds(model, ranks.rank)
    for layer in private_api.flatten_layers(model):
        if isinstance(layer, keras.layers.Normalization) and layer.built:
            layer.finalize_state()  # what it uses are copies of its weights
    private_api.set_initial_epoch(model, ranks.broadcast_object(private_api.initial_epoch(model)))


def lacks_weights(model: keras.Model) -> bool:
    """Returns whether the first step of a model would make weights."""
    parts_built = all(
        layer.built for layer in private_api.flatten_layers(model, include_self=False)
    )
    return not model.weights or (
        not (model.built or parts_built) and compiled_model.trains_as_keras(model)
    )


def require_weights(model: keras.Model) -> None:
    """Raises UserError for a model whose first step would make weights."""
    if lacks_weights(model):
        raise UserError(
            f"The model {model.name!r} lacks weights that its first step would make, so there is"
            " nothing to broadcast or to restore before it. Give it an Input, or call it on one"
            " batch before fit."
        )


def build(model: keras.Model, optimizer: Any, ranks: Communicator) -> None:
    """Builds an optimizer on the variables on which rank 0's is built, and readies it for a
    broadcast of its state.

    One of a `train_step` of the user's own stays as it is until its first `apply`, which knows the
    variables.
    """
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.attach(model)
    elif (
        isinstance(optimizer, GroupedOptimizer)
        and compiled_model.trains_as_keras(model)
        and not optimizer.built
    ):
        optimizer.set_kinds(classify(model))
    if (
        compiled_model.trains_as_keras(model)
        and optimizer is model.optimizer
        and not optimizer.built
    ):
        optimizer.build(model.trainable_variables)
    places = ranks.broadcast_object(built_on(model, optimizer))
    if places is not None and not optimizer.built:
        optimizer.build([model.trainable_variables[place] for place in places])
    if not isinstance(optimizer, DistributedOptimizer):
        return
    optimizer.connect()
    optimizer.average_sums(ranks)
    hyperparameters = hyperparameters_of(optimizer)
    if hyperparameters is not None:
        values = {name: hyperparameters[name] for name in hyperparameters.names}
        set_scalars(optimizer, ranks.broadcast_object(values))


def built_on(model: keras.Model, optimizer: Any) -> list[int] | None:
    """Returns the places of an optimizer's variables among the model's trainable ones; None before
    it is built.
    """
    if not optimizer.built:
        return None
    places = {id(v): place for place, v in enumerate(model.trainable_variables)}
    return [places[id(v)] for v in private_api.trainable_variables(optimizer) if id(v) in places]


def set_scalars(optimizer: Any, values: Mapping[str, float]) -> None:
    """Sets the scalars of a step: all that the inner optimizer takes, of Keras's the learning rate
    alone.
    """
    hyperparameters = hyperparameters_of(optimizer)
    if hyperparameters is None:
        getattr(optimizer, "inner", optimizer).learning_rate = values["learning_rate"]
    else:
        hyperparameters.assign(values)
