"""Lists the forms in which a network is written, by the suffix of the file; needs no TensorFlow."""

from __future__ import annotations

import pathlib

from hybrid_imagenet.errors import UserError, did_you_mean

FORMS = {
    ".keras": "Keras",
    ".onnx": "ONNX",
    ".safetensors": "torchvision",
    ".pth": "torchvision",
    ".weights.h5": "keras.applications",
    ".npz": "a checkpoint without an optimizer",
    "": "a directory with a TensorFlow SavedModel",
}
"""The title of each form by suffix."""


def find(path: pathlib.Path) -> str:
    """Returns the suffix of `FORMS` that a name ends in; raises UserError if there is none."""
    for suffix in FORMS:
        if path.name.endswith(suffix) if suffix else not path.suffix:
            return suffix
    forms = ", ".join(f"{suffix or 'no suffix'} ({title})" for suffix, title in FORMS.items())
    raise UserError(f"--to={path}: the name must end in one of: {forms}{did_you_mean(path.suffix, FORMS)}")
