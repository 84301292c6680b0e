"""Reads and writes state dictionaries of torchvision's ResNets.

It reads .safetensors and .pth files, and writes .safetensors files.

torchvision's networks equal this package's (v1.5, with the stride in the 3x3 convolution; padding
on all sides; epsilon 1e-5; images normalized by ImageNet's means and deviations), so weights carry
over unchanged. Only the order of axes differs: PyTorch's kernels are [out, in, k, k], and its
classifier is [classes, features]. Weights are dictionaries from the path of a Keras variable
(`stem_conv/kernel`) to a float32 array.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hybrid_imagenet.errors import UserError, import_optional
from hybrid_imagenet.models.depths import BASIC, DEPTHS, TORCHVISION_NETWORKS

# Variables of a normalization: torchvision's name to Keras's.
_NORM_VARIABLES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_NEEDS_SAFETENSORS = ".safetensors files need the package safetensors. Install it."
# PyTorch's normalizations count batches, which Keras's do not.
_BATCH_COUNTER = "num_batches_tracked"
# Training programs store the weights under these keys, together with other state.
_WRAPPER_KEYS = ("state_dict", "model")
_MAX_ERROR_LENGTH = 200


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Reads a file.

    Returns:
      Name of the network, and weights by path of the Keras variable.

    Raises:
      UserError: if the file cannot be read, or does not hold one of torchvision's ResNets.
    """
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    tensors = {name: value for name, value in content.items() if not name.endswith(_BATCH_COUNTER)}
    for model in TORCHVISION_NETWORKS:
        keras_paths = _keras_paths(model)
        if set(keras_paths) == set(tensors):
            return model, {
                keras_path: _to_keras_axes(tensors[torch_name])
                for torch_name, keras_path in keras_paths.items()
            }
    example = f"its first tensor is {min(tensors)}" if tensors else "it is empty"
    raise UserError(
        f"{path} does not hold the weights of torchvision's"
        f" {', '.join(TORCHVISION_NETWORKS)} ({example})."
    )


def write(path: Path, model: str, weights: Mapping[str, np.ndarray]) -> None:
    """Writes the weights of one of torchvision's ResNets, for its `load_state_dict`.

    Args:
      path: a .safetensors file.
      model: one of `TORCHVISION_NETWORKS`.
      weights: by path of the Keras variable.

    Raises:
      UserError: if the package safetensors is not installed.
      OSError: if the file cannot be written.
    """
    safetensors = import_optional("safetensors", _NEEDS_SAFETENSORS)
    safetensors_numpy = import_optional("safetensors.numpy", _NEEDS_SAFETENSORS)
    tensors = {
        torch_name: _to_torch_axes(weights[keras_path])
        for torch_name, keras_path in _keras_paths(model).items()
    }
    try:
        safetensors_numpy.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        raise OSError(_first_line(error)) from None


def _keras_paths(model: str) -> dict[str, str]:
    """Returns the paths of all Keras variables by torchvision's names."""
    paths = {}
    for (conv, norm), prefix in _layer_prefixes(model).items():
        paths[f"{conv}.weight"] = f"{prefix}_conv/kernel"
        for torch_variable, keras_variable in _NORM_VARIABLES.items():
            paths[f"{norm}.{torch_variable}"] = f"{prefix}_bn/{keras_variable}"
    paths["fc.weight"] = "logits/kernel"
    paths["fc.bias"] = "logits/bias"
    return paths


def _layer_prefixes(model: str) -> dict[tuple[str, str], str]:
    """Returns this package's prefix of each convolution and its normalization.

    The keys are torchvision's names of both.
    """
    convolutions_per_block = 2 if model in BASIC else 3
    prefixes = {("conv1", "bn1"): "stem"}
    for stage, count in enumerate(DEPTHS[model], start=1):
        for block in range(count):
            torch_block = f"layer{stage}.{block}"
            keras_block = f"stage{stage}_block{block + 1}"
            # A basic block of the first stage does not change the shape.
            has_projection = block == 0 and (stage > 1 or model not in BASIC)
            if has_projection:
                key = (f"{torch_block}.downsample.0", f"{torch_block}.downsample.1")
                prefixes[key] = f"{keras_block}_shortcut"
            for number in range(1, convolutions_per_block + 1):
                key = (f"{torch_block}.conv{number}", f"{torch_block}.bn{number}")
                prefixes[key] = f"{keras_block}_{number}"
    return prefixes


def _to_keras_axes(value: np.ndarray) -> np.ndarray:
    """Converts [out, in, ...] to [..., in, out]."""
    order = {4: (2, 3, 1, 0), 2: (1, 0)}.get(value.ndim)
    return np.ascontiguousarray(value.transpose(order) if order else value, np.float32)


def _to_torch_axes(value: np.ndarray) -> np.ndarray:
    """Converts [..., in, out] to [out, in, ...]."""
    order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(value.ndim)
    return np.ascontiguousarray(value.transpose(order) if order else value)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    safetensors = import_optional("safetensors", _NEEDS_SAFETENSORS)
    safetensors_numpy = import_optional("safetensors.numpy", _NEEDS_SAFETENSORS)
    try:
        return dict(safetensors_numpy.load_file(path))
    except (OSError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as a safetensors file ({_first_line(error)}). Pass another"
            " file."
        ) from None


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a .pth file."""
    torch = import_optional(
        "torch", f"{path.suffix} files need PyTorch. Install torch, or use .safetensors."
    )
    try:
        # `weights_only` keeps PyTorch from creating other objects of a pickle, which could run
        # code.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # For a damaged file PyTorch raises errors of many types.
        reason = _first_line(error)
        if "weights_only" in str(error):
            reason = "it holds objects other than tensors"
        raise UserError(
            f"{path} cannot be read as weights ({reason}). Save only its state_dict."
        ) from None
    for key in _WRAPPER_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    is_state_dict = isinstance(content, Mapping) and all(
        torch.is_tensor(value) for value in content.values()
    )
    if not is_state_dict:
        raise UserError(f"{path} is not a state dictionary. Save only its state_dict.")
    return {str(name): value.float().numpy() for name, value in content.items()}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MAX_ERROR_LENGTH]
