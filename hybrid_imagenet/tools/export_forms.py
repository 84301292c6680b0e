"""Writes a network to each form of file, and runs the file to compare its outputs."""

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

from hybrid_imagenet.checkpoints import pretrained
from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
from hybrid_imagenet.data import device
from hybrid_imagenet.errors import import_optional
from hybrid_imagenet.models import torchvision
from hybrid_imagenet.models.layers import BlurPool, Conv2D, MaxPool2D
from hybrid_imagenet.models.normalization import BatchNormalization
from hybrid_imagenet.tools import export_checks

Outputs = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Form:
    """One kind of file.

    Attributes:
      write: `(network, path)`; raises UserError for a network that the file cannot hold.
      open: `(network, path)` gives a function from pixels, float32 [b, s, s, 3], to the file's
        logits [b, classes].
    """

    write: Callable[[TrainedNetwork, pathlib.Path], None]
    open: Callable[[TrainedNetwork, pathlib.Path], Outputs]


def outputs(network: TrainedNetwork) -> Outputs:
    """The network itself, as a function from pixels of 0 to 255 to logits."""
    model = network.build()
    return lambda pixels: model(network.preprocess(pixels), training=False).numpy()


def _rebuilt(network: TrainedNetwork) -> keras.Model:
    """Returns a network of Keras' own layers in FP32, whose files can be read without this package.

    It takes RGB pixels of 0 to 255, float32 [b, s, s, 3], to logits, float32 [b, classes]; its
    first layer normalizes.
    """
    model, first = network.build(), True

    def call(layer: keras.layers.Layer, x: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            x = keras.layers.Rescaling(
                device.SCALE.tolist(), device.OFFSET.tolist(), name="normalize"
            )(x)
            first = False
        if isinstance(model.get_layer(layer.name), BlurPool):
            x = keras.layers.AveragePooling2D(2, 1, name=f"{layer.name}_first")(_with_edges(x))
        pad = getattr(model.get_layer(layer.name), "pad", 0)
        if pad:
            x = keras.layers.ZeroPadding2D(pad, name=f"{layer.name}_pad")(x)
        return layer(x, **kwargs)

    pixels = keras.Input((network.image_size, network.image_size, 3), dtype="float32", name="image")
    rebuilt = keras.models.clone_model(
        model, input_tensors=pixels, clone_function=_clone, call_function=call
    )
    values = {variable.path: variable for variable in model.weights}
    for variable in rebuilt.weights:
        variable.assign(values[variable.path])
    return rebuilt


def _with_edges(x: keras.KerasTensor) -> keras.KerasTensor:
    """[b, h, w, c] with its outermost pixels repeated once, [b, h + 2, w + 2, c]."""
    for axis in (1, 2):
        rest = x.shape[axis] - 1
        crops = [[(0, rest), (0, 0)], [(rest, 0), (0, 0)]]
        first, last = (
            keras.layers.Cropping2D(crop if axis == 1 else crop[::-1])(x) for crop in crops
        )
        x = keras.layers.Concatenate(axis=axis)([first, x, last])
    return x


def _clone(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Keras' own layer in place of one of the package's, with the settings that both have."""
    if isinstance(layer, BlurPool):  # `_rebuilt` puts the first of its two means before it
        return keras.layers.AveragePooling2D(2, layer.strides, name=layer.name)
    if isinstance(layer, MaxPool2D):
        return keras.layers.MaxPooling2D(layer.pool_size, layer.strides, name=layer.name)
    if isinstance(layer, Conv2D):
        return keras.layers.Conv2D.from_config(super(Conv2D, layer).get_config())
    if isinstance(layer, BatchNormalization):
        return keras.layers.BatchNormalization.from_config(
            super(BatchNormalization, layer).get_config()
        )
    return type(layer).from_config(layer.get_config())


def _write_keras(network: TrainedNetwork, path: pathlib.Path) -> None:
    _rebuilt(network).save(path)


def _open_keras(_: TrainedNetwork, path: pathlib.Path) -> Outputs:
    model = keras.saving.load_model(path, compile=False)
    return lambda pixels: model(pixels, training=False).numpy()


def _write_saved_model(network: TrainedNetwork, path: pathlib.Path) -> None:
    try:
        _rebuilt(network).export(path, format="tf_saved_model", verbose=False)
    except tf.errors.OpError as error:
        raise OSError(error.message) from None


def _open_saved_model(_: TrainedNetwork, path: pathlib.Path) -> Outputs:
    loaded = tf.saved_model.load(str(path))
    return lambda pixels: loaded.serve(pixels).numpy()


def _write_onnx(network: TrainedNetwork, path: pathlib.Path) -> None:
    onnx = _onnx_module("onnx")
    _onnx_module("tf2onnx")
    signature = tf.TensorSpec(
        (None, network.image_size, network.image_size, 3), tf.float32, name="image"
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # of NumPy, about a name that the converter asks for
        _rebuilt(network).export(path, format="onnx", verbose=False, input_signature=[signature])
    model = onnx.load(path)
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["logits" if name == output.name else name for name in node.output]
    output.name = "logits"
    for tensor in (*model.graph.input, output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, _onnx_properties(network))
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _onnx_properties(network: TrainedNetwork) -> dict[str, str]:
    return {
        "class_names": json.dumps(network.class_names),
        "image_size": str(network.image_size),
        "crop_fraction": str(network.crop_fraction),
        "pixels": "RGB, 0 to 255, float32 [batch, image_size, image_size, 3]",
    }


def _open_onnx(_: TrainedNetwork, path: pathlib.Path) -> Outputs:
    runtime = _onnx_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["logits"], {"image": pixels})[0]


def _onnx_module(name: str) -> Any:
    return import_optional(
        name, f"ONNX needs the package {name}; install the extra hybrid_imagenet[export]"
    )


def _write_torchvision(network: TrainedNetwork, path: pathlib.Path) -> None:
    export_checks.check_torchvision_has(
        network.model, network.width, network.stem, network.blurpool, network.batch_norm_epsilon
    )
    torchvision.write(path, network.model, network.weights or {})


def _open_torchvision(network: TrainedNetwork, path: pathlib.Path) -> Outputs:
    return outputs(dataclasses.replace(pretrained.load(path, print), image_size=network.image_size))


FORMS = {
    ".keras": Form(_write_keras, _open_keras),
    ".onnx": Form(_write_onnx, _open_onnx),
    ".safetensors": Form(_write_torchvision, _open_torchvision),
    "": Form(_write_saved_model, _open_saved_model),
}
"""How each of `export.TITLES` is written and read, by suffix."""
