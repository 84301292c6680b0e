"""Looks at the description of a checkpoint without its arrays and without TensorFlow, to refuse a wrong one early."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid_imagenet.checkpoints import archive, metadata
from hybrid_imagenet.checkpoints.store import Check, CheckpointFolder
from hybrid_imagenet.errors import UserError

FOREIGN_SUFFIXES = (".safetensors", ".pth", ".pt", ".h5")
_FORMS = "a checkpoint (step-*.npz), the directory of a run, or weights (.safetensors, .pth, .h5)"
_KERAS_MEMBERS = {"config.json", "metadata.json"}  # of the archive that keras.Model.save writes


class Description(NamedTuple):
    """Where a checkpoint lies, and what it says of the run that wrote it; empty for files of other libraries."""

    path: pathlib.Path
    meta: Mapping[str, Any]


def look(path: pathlib.Path) -> Description:
    """Reads the description of a checkpoint, or of the newest readable one of a run.

    Args:
      path: a checkpoint, the directory of a run, or a file of weights.

    Raises:
      UserError: if there is no such file, or nothing there is a checkpoint.
    """
    path = path.expanduser()
    if path.is_dir():
        found = newest(path / "checkpoints") or newest(path)
        if found is None:
            raise UserError(f"{path}: holds no usable checkpoint (checkpoints/step-*.npz); give another run")
        return found
    if not path.exists():
        raise UserError(f"{path}: no such file or directory; give {_FORMS}")
    if path.suffix in FOREIGN_SUFFIXES:
        return Description(path, {})
    if is_keras_model(path):
        raise UserError(
            f"{path}: a model that Keras has saved, not a checkpoint: load it in Python with keras.saving.load_model, "
            f"or give {_FORMS}"
        )
    if path.is_file() and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not a checkpoint, or one that is cut short; give {_FORMS}")
    try:
        return Description(path, archive.read_meta(path))
    except archive.DamagedCheckpointError as error:
        raise UserError(f"{error}; give {_FORMS}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None


def newest(directory: pathlib.Path, check: Check = metadata.check_network) -> Description | None:
    """Returns the description of the newest checkpoint in a directory that can be used; None without one.

    Args:
      directory: need not exist.
      check: raises ValueError for a description that lacks what the checkpoint is needed for.
    """
    for path in CheckpointFolder(directory, lambda _: None).paths():
        try:
            meta = archive.read_meta(path)
            check(meta)
            return Description(path, meta)
        except (archive.DamagedCheckpointError, OSError, ValueError):  # set aside, and reported, when the run starts
            continue
    return None


def is_keras_model(path: pathlib.Path) -> bool:
    """Returns whether a file is an archive that Keras has written (.keras)."""
    try:
        with zipfile.ZipFile(path) as opened:
            return set(opened.namelist()) >= _KERAS_MEMBERS
    except (OSError, ValueError, zipfile.BadZipFile):
        return False
