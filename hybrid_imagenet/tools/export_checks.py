"""Checks whether a network can be exported in a format, before TensorFlow is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import depths

# Packages that training does not need, by suffix.
_EXTRA_PACKAGES = {".onnx": ("onnx", "tf2onnx", "onnxruntime"), ".safetensors": ("safetensors",)}


def check_format(suffix: str, meta: Mapping[str, Any]) -> None:
    """Checks that a format's packages are installed, and that it can contain the network.

    Args:
      suffix: a key of `export.FORMAT_TITLES`.
      meta: the metadata of a checkpoint; empty for torchvision weights.

    Raises:
      UserError: if a package is missing, or the format cannot contain the network.
    """
    for name in _EXTRA_PACKAGES.get(suffix, ()):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--to: {suffix} files need the package {name}. Run pip install {name}, or export"
                " to .keras, which needs no other package."
            )
    if suffix == ".safetensors" and "model" in meta:
        check_torchvision_has(
            str(meta["model"]),
            meta.get("width", depths.WIDTH),
            meta.get("stem", "imagenet"),
            meta.get("blurpool", False),
            meta.get("batch_norm_epsilon", depths.TORCHVISION_EPSILON),
        )


def check_torchvision_has(
    model: str, width: int, stem: str, blurpool: bool, epsilon: float
) -> None:
    """Raises UserError if torchvision has no network with this architecture."""
    if not depths.torchvision_has(model, width, stem, blurpool, epsilon):
        raise UserError(
            f"--to: torchvision has no {model} of width {width}, stem {stem}, blurpool {blurpool}"
            f" and epsilon {epsilon:g}. Export to .onnx instead."
        )
