"""Writes a network to each kind of file, and runs the file to compare its outputs."""

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
from hybrid_imagenet.checkpoints.pretrained import Trained
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.weights import applications, torchvision
from hybrid_imagenet.models.weights.layers import with_epsilon
from hybrid_imagenet.numerics.depths import WIDTH
from hybrid_imagenet.tools.export import forms, stock

Outputs = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of file.

    Attributes:
      write: `(network, path)`; raises UserError for a network that the file cannot hold.
      open: `(network, path)` gives a function from pixels, float32 [b, s, s, 3], to the file's logits [b, classes].
    """

    write: Callable[[Trained, pathlib.Path], None]
    open: Callable[[Trained, pathlib.Path], Outputs]


def find(path: pathlib.Path) -> Target:
    """The kind of file that a name asks for; raises UserError if there is none."""
    return TARGETS[forms.find(path)]


def outputs(network: Trained) -> Outputs:
    """The network itself, as a function from pixels of 0 to 255 to logits."""
    model = network.build()
    return lambda pixels: model(network.preprocess(pixels), training=False).numpy()


def _stock(network: Trained) -> keras.Model:
    return stock.rebuild(network, network.build())


def _write_keras(network: Trained, path: pathlib.Path) -> None:
    _stock(network).save(path)


def _open_keras(_: Trained, path: pathlib.Path) -> Outputs:
    model = keras.saving.load_model(path, compile=False)
    return lambda pixels: model(pixels, training=False).numpy()


def _write_saved_model(network: Trained, path: pathlib.Path) -> None:
    _stock(network).export(path, format="tf_saved_model", verbose=False)


def _open_saved_model(_: Trained, path: pathlib.Path) -> Outputs:
    loaded = tf.saved_model.load(str(path))
    return lambda pixels: loaded.serve(pixels).numpy()


def _write_onnx(network: Trained, path: pathlib.Path) -> None:
    """Keras' own conversion by tf2onnx; then names for output and batch, which it leaves to chance."""
    onnx = _onnx_module("onnx")
    _onnx_module("tf2onnx")
    signature = tf.TensorSpec((None, network.image_size, network.image_size, 3), tf.float32, name="image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of NumPy, about a name that the converter asks for
        _stock(network).export(path, format="onnx", verbose=False, input_signature=[signature])
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


def _onnx_properties(network: Trained) -> dict[str, str]:
    """What one needs to know to run the file; the values of ONNX's metadata are texts."""
    return {
        "class_names": json.dumps(network.class_names),
        "image_size": str(network.image_size),
        "crop_fraction": str(network.crop_fraction),
        "pixels": "RGB, 0 to 255, float32 [batch, image_size, image_size, 3]",
    }


def _open_onnx(_: Trained, path: pathlib.Path) -> Outputs:
    runtime = _onnx_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(["logits"], {"image": pixels})[0]


def _onnx_module(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise UserError(f"ONNX needs the package {name}; install the extra hybrid_imagenet[export]") from None


def _write_torchvision(network: Trained, path: pathlib.Path) -> None:
    usual = (pretrained.device.MEAN, pretrained.device.DEVIATION)
    if not network.model.startswith("resnet"):
        raise UserError(
            f"{network.origin}: torchvision has no {network.model} with batch normalization; export to .onnx"
        )
    if network.stride_in_1x1 or (network.pixel_mean, network.pixel_deviation) != usual:
        raise UserError(
            f"{network.origin}: this is a network of keras.applications (stride in the 1x1 convolution, other "
            "preprocessing), which torchvision does not have; export to .onnx"
        )
    if (network.width, network.stem) != (WIDTH, "imagenet"):
        raise UserError(
            f"{network.origin}: torchvision has no {network.model} with --model_width={network.width} and "
            f"--stem={network.stem}; export to .onnx"
        )
    if network.blurpool:
        raise UserError(f"{network.origin}: torchvision has no {network.model} with --blurpool; export to .onnx")
    weights = with_epsilon(network.weights or {}, network.batch_norm_epsilon, torchvision.EPSILON)
    torchvision.write(path, network.model, weights)


def _write_applications(network: Trained, path: pathlib.Path) -> None:
    if not network.stride_in_1x1:
        raise UserError(
            f"{network.origin}: {network.model} has its strides in the 3x3 convolutions, keras.applications in "
            "the 1x1, so no weights make them equal; export to .keras"
        )
    weights = with_epsilon(network.weights or {}, network.batch_norm_epsilon, applications.EPSILON)
    applications.write(path, network.model, weights, bgr=_takes_bgr(network))


def _takes_bgr(network: Trained) -> bool:
    """Whether the network sees pixels as keras.applications' own preprocessing (mode "caffe") leaves them."""
    return network.pixel_mean == applications.PIXEL_MEAN


def _write_checkpoint(network: Trained, path: pathlib.Path) -> None:
    network.build()  # refuses a description that does not fit the weights
    network.save(path)


def _open_weights(network: Trained, path: pathlib.Path) -> Outputs:
    again = pretrained.load(path, print, bgr=_takes_bgr(network))
    return outputs(dataclasses.replace(again, image_size=network.image_size))


TARGETS = {
    ".keras": Target(_write_keras, _open_keras),
    ".onnx": Target(_write_onnx, _open_onnx),
    ".safetensors": Target(_write_torchvision, _open_weights),
    ".pth": Target(_write_torchvision, _open_weights),
    ".weights.h5": Target(_write_applications, _open_weights),
    ".npz": Target(_write_checkpoint, _open_weights),
    "": Target(_write_saved_model, _open_saved_model),
}
"""How each of `forms.FORMS` is written and read, by suffix."""
