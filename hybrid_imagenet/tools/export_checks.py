"""Finds out whether a network can be exported in a form, before TensorFlow is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import depths

# Packages that are not among those of training, by suffix.
_PACKAGES = {".onnx": ("onnx", "tf2onnx", "onnxruntime"), ".safetensors": ("safetensors",)}


def check_form(suffix: str, meta: Mapping[str, Any]) -> None:
    """Raises UserError if a package for a form is missing, or if the form cannot hold the network
    of a description.

    Args:
      suffix: of `export.TITLES`.
      meta: of a checkpoint; empty for weights of torchvision.
    """
    for name in _PACKAGES.get(suffix, ()):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--to: {suffix} files need the package {name}: pip install {name}, or export to"
                " .keras, which needs no other package"
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
    """Raises UserError if torchvision has no network of this form."""
    if not depths.torchvision_has(model, width, stem, blurpool, epsilon):
        raise UserError(
            f"--to: torchvision has no {model} of width {width}, stem {stem}, blurpool {blurpool}"
            f" and epsilon {epsilon:g}; export to .onnx"
        )
