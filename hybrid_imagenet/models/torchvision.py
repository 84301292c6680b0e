"""Reads state dictionaries of torchvision's ResNets, in .safetensors or .pth files, and writes
.safetensors.

torchvision's networks equal this package's (v1.5: the stride in the 3x3 convolution; padding on all
sides; epsilon 1e-5; images normalized by ImageNet's means and deviations), so weights carry over
unchanged. Only the order of axes differs: PyTorch's kernels are [out, in, k, k], its classifier
[classes, features]. Weights are dictionaries from the path of a Keras variable (`stem_conv/kernel`)
to a float32 array.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hybrid_imagenet.errors import UserError, import_optional
from hybrid_imagenet.models.depths import BASIC, DEPTHS, TORCHVISION_NETWORKS

_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_SAFETENSORS = ".safetensors files need the package safetensors; install it"
_COUNTER = "num_batches_tracked"
_WRAPPERS = (
    "state_dict",
    "model",
)  # under which training programs keep the weights beside other things


def read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Reads a file; returns the name of the network and its weights.

    Raises:
      UserError: if it cannot be read, or does not hold one of torchvision's ResNets.
    """
    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    tensors = {name: value for name, value in tensors.items() if not name.endswith(_COUNTER)}
    for model in TORCHVISION_NETWORKS:
        if set(_names(model)) == set(tensors):
            return model, {
                here: _from_torch(tensors[there]) for there, here in _names(model).items()
            }
    example = f" (its first tensor is {min(tensors)})" if tensors else " (it is empty)"
    raise UserError(
        f"{path}: does not hold the weights of torchvision's"
        f" {', '.join(TORCHVISION_NETWORKS)}{example}"
    )


def write(path: Path, model: str, weights: Mapping[str, np.ndarray]) -> None:
    """Writes the weights of one of torchvision's ResNets, for its `load_state_dict`.

    Raises:
      UserError: without the package safetensors.
      OSError: if the disk does not take it.
    """
    safetensors, arrays = (
        import_optional("safetensors", _SAFETENSORS),
        import_optional("safetensors.numpy", _SAFETENSORS),
    )
    try:
        arrays.save_file(
            {there: _to_torch(weights[here]) for there, here in _names(model).items()}, path
        )
    except safetensors.SafetensorError as error:
        raise OSError(_line(error)) from None


def _names(model: str) -> dict[str, str]:
    """Returns the paths of variables by the names that torchvision gives them."""
    names = {}
    for (conv, norm), here in _units(model).items():
        names[f"{conv}.weight"] = f"{here}_conv/kernel"
        names |= {f"{norm}.{there}": f"{here}_bn/{own}" for there, own in _NORM.items()}
    return names | {"fc.weight": "logits/kernel", "fc.bias": "logits/bias"}


def _units(model: str) -> dict[tuple[str, str], str]:
    """Returns the prefix of each convolution and its normalization by their names in
    torchvision.
    """
    found = {("conv1", "bn1"): "stem"}
    for stage, count in enumerate(DEPTHS[model], start=1):
        for block in range(count):
            there, here = f"layer{stage}.{block}", f"stage{stage}_block{block + 1}"
            if block == 0 and (stage > 1 or model not in BASIC):
                found[f"{there}.downsample.0", f"{there}.downsample.1"] = f"{here}_shortcut"
            for number in range(1, 3 if model in BASIC else 4):
                found[f"{there}.conv{number}", f"{there}.bn{number}"] = f"{here}_{number}"
    return found


def _from_torch(value: np.ndarray) -> np.ndarray:
    """[out, in, ...] to [..., in, out]."""
    order = {4: (2, 3, 1, 0), 2: (1, 0)}.get(value.ndim)
    return np.ascontiguousarray(value.transpose(order) if order else value, np.float32)


def _to_torch(value: np.ndarray) -> np.ndarray:
    """[..., in, out] to [out, in, ...]."""
    order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(value.ndim)
    return np.ascontiguousarray(value.transpose(order) if order else value)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    safetensors, arrays = (
        import_optional("safetensors", _SAFETENSORS),
        import_optional("safetensors.numpy", _SAFETENSORS),
    )
    try:
        return dict(arrays.load_file(path))
    except (OSError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors file ({_line(error)})") from None


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a .pth file; `weights_only` keeps PyTorch from building any other object of a
    pickle.
    """
    torch = import_optional(
        "torch", f"{path.suffix} files need PyTorch; install torch, or use .safetensors"
    )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes PyTorch raise errors of many types
        reason = (
            "it holds other objects than tensors" if "weights_only" in str(error) else _line(error)
        )
        raise UserError(
            f"{path}: cannot be read as weights ({reason}); save its state_dict alone"
        ) from None
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        torch.is_tensor(value) for value in content.values()
    ):
        raise UserError(f"{path}: is not a state dictionary; save its state_dict alone")
    return {str(name): value.float().numpy() for name, value in content.items()}


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
