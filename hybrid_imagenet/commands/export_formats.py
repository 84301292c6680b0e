"""Writes a network in each file format, and opens the file to compute its outputs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
from hybrid_imagenet.data import device
from hybrid_imagenet.errors import import_optional
from hybrid_imagenet.models.layers import BlurPool, Conv2D, MaxPool2D
from hybrid_imagenet.models.normalization import BatchNormalization

# From RGB pixels of 0 to 255, float32 [batch, size, size, 3], to logits [batch, classes].
LogitsFunction = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ExportFormat:
    """How files of one format are written and opened.

    Attributes:
      write: `write(network, path)`; raises UserError for a network that the file cannot contain.
      open: `open(network, path)`; returns the function that the file computes.
    """

    write: Callable[[TrainedNetwork, pathlib.Path], None]
    open: Callable[[TrainedNetwork, pathlib.Path], LogitsFunction]


def logits_function(network: TrainedNetwork) -> LogitsFunction:
    """Returns the function that the network itself computes."""
    model = network.build()
    return lambda pixels: model(network.preprocess(pixels), training=False).numpy()


def _rebuild_with_keras_layers(network: TrainedNetwork) -> keras.Model:
    """Returns a network of Keras' own layers in FP32, whose files can be read without this package.

    It computes logits, float32 [batch, classes], from RGB pixels of 0 to 255, float32 [batch, size,
    size, 3]: an additional first layer normalizes the pixels.
    """
    model = network.build()
    if isinstance(model, keras.Sequential):
        # `clone_model` calls `call_layer` only for functional models.
        model = keras.Model(model.inputs[0], model.outputs[0])
    is_first_call = True

    def call_layer(layer: keras.layers.Layer, x: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_first_call
        if is_first_call:
            normalize = keras.layers.Rescaling(
                device.SCALE.tolist(), device.OFFSET.tolist(), name="normalize"
            )
            x = normalize(x)
            is_first_call = False
        if not isinstance(layer, keras.layers.Layer):
            # It is a function of keras.ops, which networks of keras.applications use.
            return layer(x, *args, **kwargs)
        original_layer = model.get_layer(layer.name)
        if isinstance(original_layer, BlurPool):
            # The blur kernel [1, 2, 1] is two means of neighbors. This is the first of them; the
            # layer itself, see `_clone_layer`, is the second.
            x = _repeat_edges(x)
            x = keras.layers.AveragePooling2D(2, 1, name=f"{layer.name}_first")(x)
        pad = getattr(original_layer, "pad", 0)
        if pad:
            x = keras.layers.ZeroPadding2D(pad, name=f"{layer.name}_pad")(x)
        return layer(x, *args, **kwargs)

    pixels = keras.Input((network.image_size, network.image_size, 3), dtype="float32", name="image")
    rebuilt = keras.models.clone_model(
        model, input_tensors=pixels, clone_function=_clone_layer, call_function=call_layer
    )
    # By layer, because paths of variables in a model within the model differ in its copy.
    for layer in rebuilt.layers:
        if layer.weights:
            layer.set_weights(model.get_layer(layer.name).get_weights())
    return rebuilt


def _repeat_edges(x: keras.KerasTensor) -> keras.KerasTensor:
    """Repeats the outermost pixels once: from [b, h, w, c] to [b, h + 2, w + 2, c]."""
    for axis in (1, 2):
        last_index = x.shape[axis] - 1
        first = _crop(x, axis, (0, last_index))
        last = _crop(x, axis, (last_index, 0))
        x = keras.layers.Concatenate(axis=axis)([first, x, last])
    return x


def _crop(x: keras.KerasTensor, axis: int, amounts: tuple[int, int]) -> keras.KerasTensor:
    """Removes a number of pixels at the beginning and at the end of axis 1 or 2."""
    cropping = [amounts, (0, 0)] if axis == 1 else [(0, 0), amounts]
    return keras.layers.Cropping2D(cropping)(x)


def _clone_layer(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Returns Keras' own layer for one of this package, with the settings that both have."""
    if isinstance(layer, BlurPool):
        return keras.layers.AveragePooling2D(2, layer.strides, name=layer.name)
    if isinstance(layer, MaxPool2D):
        return keras.layers.MaxPooling2D(layer.pool_size, layer.strides, name=layer.name)
    if isinstance(layer, keras.layers.Normalization) and _is_per_channel(layer):
        # It keeps mean and deviation in tensors, which the converter to ONNX takes for inputs.
        deviation = np.maximum(np.sqrt(np.ravel(layer.variance)), keras.config.epsilon())
        offset = -np.ravel(layer.mean) / deviation
        return keras.layers.Rescaling((1 / deviation).tolist(), offset.tolist(), name=layer.name)
    if isinstance(layer, Conv2D):
        return keras.layers.Conv2D.from_config(super(Conv2D, layer).get_config())
    if isinstance(layer, BatchNormalization):
        return keras.layers.BatchNormalization.from_config(
            super(BatchNormalization, layer).get_config()
        )
    return type(layer).from_config(layer.get_config())


def _is_per_channel(layer: keras.layers.Normalization) -> bool:
    """Returns whether a layer subtracts one mean per channel, or one in all."""
    return not layer.invert and np.size(layer.mean) == np.shape(layer.mean)[-1]


def _write_keras(network: TrainedNetwork, path: pathlib.Path) -> None:
    _rebuild_with_keras_layers(network).save(path)


def _open_keras(_: TrainedNetwork, path: pathlib.Path) -> LogitsFunction:
    model = keras.saving.load_model(path, compile=False)
    return lambda pixels: model(pixels, training=False).numpy()


def _write_saved_model(network: TrainedNetwork, path: pathlib.Path) -> None:
    try:
        _rebuild_with_keras_layers(network).export(path, format="tf_saved_model", verbose=False)
    except tf.errors.OpError as error:
        raise OSError(error.message) from None


def _open_saved_model(_: TrainedNetwork, path: pathlib.Path) -> LogitsFunction:
    loaded = tf.saved_model.load(str(path))
    return lambda pixels: loaded.serve(pixels).numpy()


def _write_onnx(network: TrainedNetwork, path: pathlib.Path) -> None:
    onnx = _import_for_onnx("onnx")
    # Keras' exporter uses it.
    _import_for_onnx("tf2onnx")
    signature = tf.TensorSpec(
        (None, network.image_size, network.image_size, 3), tf.float32, name="image"
    )
    rebuilt = _rebuild_with_keras_layers(network)
    with warnings.catch_warnings():
        # The converter uses a deprecated name of NumPy.
        warnings.simplefilter("ignore", FutureWarning)
        rebuilt.export(path, format="onnx", verbose=False, input_signature=[signature])
    model = onnx.load(path)
    _rename_output(model, "logits")
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, _onnx_properties(network))
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _rename_output(model: Any, name: str) -> None:
    """Renames the only output of an ONNX model."""
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = [
            name if node_name == output.name else node_name for node_name in node.output
        ]
    output.name = name


def _onnx_properties(network: TrainedNetwork) -> dict[str, str]:
    return {
        "class_names": json.dumps(network.class_names),
        "image_size": str(network.image_size),
        "crop_fraction": str(network.crop_fraction),
        "pixels": "RGB, 0 to 255, float32 [batch, image_size, image_size, 3]",
    }


def _open_onnx(_: TrainedNetwork, path: pathlib.Path) -> LogitsFunction:
    runtime = _import_for_onnx("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["logits"], {"image": pixels})[0]


def _import_for_onnx(name: str) -> Any:
    remedy = f"ONNX files need the package {name}. Install the extra hybrid_imagenet[export]."
    return import_optional(name, remedy)


FORMATS = {
    ".keras": ExportFormat(_write_keras, _open_keras),
    ".onnx": ExportFormat(_write_onnx, _open_onnx),
    "": ExportFormat(_write_saved_model, _open_saved_model),
}
"""How each format of `export.FORMAT_TITLES` is written and opened, by suffix."""
