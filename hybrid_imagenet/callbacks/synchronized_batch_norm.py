"""Normalizes over the batches of all ranks in layers of Keras with `synchronized=True`."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import SharedError, UserError
from hybrid_imagenet.models import normalization

# Ranks connect the same layers in the same order, so a layer has the same number on all of them.
# Names of layers may differ: Keras counts them up, and a rank may have built more models.
_numbers = itertools.count()


def synchronize_batch_norm(model: keras.Model) -> keras.Model:
    """Makes all batch-normalization layers of a model normalize over all ranks in training.

    It sets `synchronized` of each `keras.layers.BatchNormalization`, nested ones included, as if
    the layer had been built with `synchronized=True`. It keeps the weights. Call it before
    `compile`, for models whose layers you do not build yourself.

    Example:
      model = hi.synchronize_batch_norm(keras.applications.ResNet50(weights=None))

    Args:
      model: Changed in place.

    Returns:
      The same model.

    Raises:
      UserError: Before `hi.init()`, if a launcher has started several ranks; for layers that cannot
        be synchronized.
    """
    has_several_ranks = process.size() > 1
    layers = normalization.all_batch_norm_layers(model)
    for layer in layers:
        _require_support(layer)
    for layer in layers:
        layer.synchronized = True
        if has_several_ranks:
            # With this attribute of Keras, for layers that XLA cannot compile, the default
            # jit_compile="auto" of `compile` trains without XLA on GPUs too.
            layer.supports_jit = False
    return model


def connect(model: keras.Model) -> None:
    """Connects the layers with `synchronized=True` to the ranks; every rank calls it.

    The layers stay layers of Keras. Only these objects get another `call`, so saved files of the
    model do not need this package.

    Args:
      model: Model of any kind. Layers that its first step would create are not connected.

    Raises:
      UserError: On all ranks, for a layer that cannot be synchronized.
    """
    layers = _synchronized_layers(model)
    for layer in layers:
        _require_support(layer)
    new = [layer for layer in layers if not isinstance(layer.call, _CallOverRanks)]
    for layer in new:
        layer.call = _CallOverRanks(layer, f"synchronized_batch_norm_{next(_numbers)}")
    if new and model.train_function is not None:
        # An earlier `fit` may have traced the layers when each rank normalized its own batch.
        model.make_train_function(force=True)


def reject_xla(model: keras.Model) -> None:
    """Raises SharedError if `fit` compiles a step with XLA that sums statistics over ranks."""
    layers = _synchronized_layers(model)
    if layers and model.jit_compile:
        names = ", ".join(layer.name for layer in layers)
        raise SharedError(
            f"{names}: synchronized=True sums over ranks inside the step, and XLA cannot compile"
            " that. Call compile(..., jit_compile=False)."
        )


def _synchronized_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the layers with `synchronized=True`; none if there is one rank."""
    layers = normalization.all_batch_norm_layers(model)
    if process.size() == 1:
        return []
    return [layer for layer in layers if layer.synchronized]


def _require_support(layer: keras.layers.BatchNormalization) -> None:
    """Raises SharedError for a layer that this module cannot synchronize."""
    kind = type(layer)
    problem = ""
    if kind.call is not keras.layers.BatchNormalization.call:
        problem = f"{kind.__name__} has its own call. Use keras.layers.BatchNormalization"
    elif layer.renorm:
        problem = "renorm=True is not supported. Omit it"
    elif layer.compute_dtype == "float64":
        problem = "moments over ranks are float32. Use float32 or a mixed policy instead of float64"
    if problem:
        raise SharedError(f"{layer.name}: synchronized=True: {problem}.")


class _CallOverRanks:
    """Replaces the `call` of one layer: training normalizes over the batches of all ranks."""

    def __init__(self, layer: keras.layers.BatchNormalization, name: str) -> None:
        self._layer = layer
        self._call_alone = layer.call
        self._name = name

    def __call__(self, inputs: Any, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        """Normalizes as `keras.layers.BatchNormalization.call`.

        Raises:
          UserError: In a function that XLA compiles; before `init`, if a launcher has started
            several ranks.
        """
        layer = self._layer
        if not training or not layer.trainable or process.size() == 1:
            return self._call_alone(inputs, training=training, mask=mask)
        if private_api.is_compiled_by_xla():
            raise UserError(
                f"{layer.name}: synchronized=True sums over ranks, and XLA cannot compile that."
                " Omit jit_compile=True."
            )
        inputs = tf.convert_to_tensor(inputs)
        if mask is not None and layer.axis % inputs.shape.rank != inputs.shape.rank - 1:
            raise UserError(
                f"{layer.name}: synchronized=True with a mask needs the channels in the last axis."
            )
        x = _channels_last(inputs, layer.axis)
        channels = x.shape[-1]
        images = x if x.shape.rank == 4 and mask is None else tf.reshape(x, [-1, 1, 1, channels])
        if mask is not None:
            mask = tf.broadcast_to(tf.cast(mask, tf.float32), tf.shape(x)[:-1])
            mask = tf.reshape(mask, [-1, 1, 1, 1])
        scale = tf.ones([channels]) if layer.gamma is None else tf.cast(layer.gamma, tf.float32)
        offset = tf.zeros([channels]) if layer.beta is None else tf.cast(layer.beta, tf.float32)
        outputs, mean, variance = normalization.normalize_over_ranks(
            images, scale, offset, layer.epsilon, self._allreduce, self._name, mask
        )
        for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            batch_value = tf.cast(value, variable.dtype)
            variable.assign(variable * layer.momentum + batch_value * (1.0 - layer.momentum))
        outputs = tf.ensure_shape(tf.reshape(outputs, tf.shape(x)), x.shape)
        return tf.cast(_channels_back(outputs, layer.axis), layer.compute_dtype)

    def _allreduce(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        # A step is being traced, and ranks that are not connected yet must connect outside it.
        with tf.init_scope():
            communicator = process.communicator()
        # The slash leaves the scopes of layers, whose names may differ between ranks. A layer that
        # a step calls twice gets a suffix from the graph.
        with tf.name_scope(f"{self._name}/"):
            return communicator.allreduce_sum(tensor, name)


def _channels_last(inputs: tf.Tensor, axis: int) -> tf.Tensor:
    """Moves an axis to the end."""
    rank = inputs.shape.rank
    position = axis % rank
    if position == rank - 1:
        return inputs
    others = [number for number in range(rank) if number != position]
    return tf.transpose(inputs, [*others, position])


def _channels_back(outputs: tf.Tensor, axis: int) -> tf.Tensor:
    """Moves the last axis to where it was before `_channels_last`."""
    last = outputs.shape.rank - 1
    position = axis % outputs.shape.rank
    if position == last:
        return outputs
    order = list(range(last))
    order.insert(position, last)
    return tf.transpose(outputs, order)
