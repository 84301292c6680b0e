"""Reads state dictionaries of torchvision's ResNets, which timm's plain ResNets share.

Files are .safetensors or .pth.

torchvision's networks equal this package's (v1.5, with the stride in the 3x3 convolution; padding
on all sides; epsilon 1e-5; images normalized by ImageNet's means and deviations), so weights carry
over unchanged. Only the order of axes differs: PyTorch's kernels are [out, in, k, k], and its
classifier is [classes, features]. Weights are dictionaries from the path of a Keras variable
(`stem_conv/kernel`) to a float32 array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hybrid_imagenet.errors import UserError, import_optional
from hybrid_imagenet.models.depths import BASIC, DEPTHS, TORCHVISION_NETWORKS, WIDTH

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

_BLOCK = re.compile(r"layer(\d)\.(\d+)\.")
# The networks by blocks in each stage, and whether these are bottlenecks.
_NETWORKS = {(tuple(DEPTHS[model]), model not in BASIC): model for model in TORCHVISION_NETWORKS}
# timm's names of networks that compute the same as torchvision's. Older releases of timm had more
# prefixes for other sources of weights.
_PLAIN_ARCHITECTURE = re.compile(r"(tv_|gluon_|ssl_|swsl_)?resnet(18|34|50|101|152)(_v1b)?(\..*)?")
# Names of tensors that only another network has, and its difference.
_DIFFERENCES = {
    r"conv1\.\d+\.weight": "its stem has three convolutions, as resnet50d in timm",
    r"layer1\.0\.downsample\.2\.weight": "its shortcuts pool before their convolution",
    r".*\.se\..*": "its blocks have channel attention (squeeze and excitation)",
    r".*\.conv2\.(fc|bn|conv_attn|attn).*": "its blocks have split attention",
}


def read(path: Path, log: Callable[[str], object]) -> tuple[str, dict[str, np.ndarray]]:
    """Reads a file.

    Args:
      path: A .safetensors or .pth file.
      log: Receives a line if no config.json next to the file names the network.

    Returns:
      Name of the network, and weights by path of the Keras variable.

    Raises:
      UserError: If the file cannot be read, or holds another network. The message names the first
        difference.
    """
    is_named = _check_architecture(path)
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    tensors = {name: value for name, value in content.items() if not name.endswith(_BATCH_COUNTER)}
    difference = _difference(tensors)
    if difference:
        raise UserError(
            f"{path} holds another network: {difference}. Pass weights of"
            f" {', '.join(TORCHVISION_NETWORKS)} of torchvision or timm."
        )
    model = _NETWORKS[_block_counts(tensors), _is_bottleneck(tensors)]
    if not is_named:
        log(
            f"{path} does not name its network, so it is read as {model}. Some other networks have"
            " tensors of the same names and shapes, such as resnetblur50 of timm, and would lose"
            " accuracy. timm's config.json next to the file names the network."
        )
    return model, {
        keras_path: _to_keras_axes(tensors[torch_name])
        for torch_name, keras_path in _keras_paths(model).items()
    }


def _check_architecture(path: Path) -> bool:
    """Checks the config.json that timm's repositories have next to the weights, if there is one.

    Some of timm's variants have the tensors of a plain ResNet, but compute something else with
    them: resnetblur50 and resnetaa50 blur, others use another activation.

    Returns:
      Whether there is such a file and it names a plain ResNet.

    Raises:
      UserError: If the file names another architecture.
    """
    try:
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        architecture = config["architecture"]
    except (OSError, ValueError, KeyError, TypeError):
        # A run directory has a config.json too. Without a name there is nothing to check.
        return False
    if not _PLAIN_ARCHITECTURE.fullmatch(str(architecture)):
        raise UserError(
            f"{path} holds another network: config.json next to it names {architecture}. Pass"
            f" weights of {', '.join(TORCHVISION_NETWORKS)} of torchvision or timm."
        )
    return True


def _difference(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns how a state dictionary differs from those of torchvision's ResNets, or ""."""
    if not tensors:
        return "it has no tensors"
    for pattern, difference in _DIFFERENCES.items():
        if any(re.fullmatch(pattern, name) for name in tensors):
            return difference
    for name in ("conv1.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight"):
        if name not in tensors:
            return f"it has no {name}, but {min(tensors)}"
    if "bn1.running_mean" not in tensors:
        return "its normalization has no running averages, as group normalization"
    if "fc.weight" not in tensors:
        return "it has no classifier (fc.weight)"
    model = _NETWORKS.get((_block_counts(tensors), _is_bottleneck(tensors)))
    if model is None:
        kind = "bottleneck" if _is_bottleneck(tensors) else "basic"
        return f"it has {'-'.join(map(str, _block_counts(tensors)))} {kind} blocks in its stages"
    names = set(_keras_paths(model))
    if names != set(tensors):
        name = min(names ^ set(tensors))
        verb = "lacks" if name in names else "also has"
        return f"it {verb} {name}, compared with {model}"
    return _shape_difference(tensors)


def _shape_difference(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns how the shapes of the first kernels differ, or ""."""
    channels = tensors["conv1.weight"].shape[1]
    if channels != 3:
        return f"its images have {channels} channels"
    first = tensors["layer1.0.conv1.weight"].shape
    second = tensors["layer1.0.conv2.weight"].shape
    if second[1] != first[0]:
        return f"its convolutions have {first[0] // second[1]} groups, as in ResNeXt"
    if first[0] != WIDTH:
        return f"its blocks are {first[0]} channels wide instead of {WIDTH}"
    return ""


def _block_counts(tensors: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """Returns the number of blocks in each stage."""
    blocks = {match.groups() for name in tensors if (match := _BLOCK.match(name))}
    stages = sorted({stage for stage, _ in blocks})
    return tuple(sum(block_stage == stage for block_stage, _ in blocks) for stage in stages)


def _is_bottleneck(tensors: Mapping[str, np.ndarray]) -> bool:
    return "layer1.0.conv3.weight" in tensors


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


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a .safetensors file."""
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
