"""Checks by listings alone, within a second, whether a dataset can be opened; no image is read, no server asked."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from hybrid_imagenet import data
from hybrid_imagenet.data import shards
from hybrid_imagenet.errors import UserError, without_secrets


@dataclasses.dataclass(frozen=True)
class Glance:
    """What a listing shows of a dataset.

    Attributes:
      text: where it was found, for people.
      classes: their number; None where only reading can tell.
    """

    text: str
    classes: int | None = None


def look(
    name: str,
    data_dir: str | None = None,
    *,
    cache_dir: str | None = None,
    val_fraction: float = 0.0,
    splits: tuple[str, ...] = data.SPLITS,
) -> Glance:
    """Looks for the files of splits of a dataset; arguments as for `data.open_source`.

    Raises:
      UserError: for a dataset that is unknown, or whose directory or files are missing.
    """
    data.check_place(name, data_dir, cache_dir, val_fraction)
    if "://" in (data_dir or "") and name in data.FROM_STORAGE:
        return Glance(without_secrets(f"{data_dir} is read when training starts"))
    directory = Path(data_dir).expanduser() if data_dir else None
    if name == "digits":
        return _digits(directory)
    if name.startswith("synthetic"):
        return Glance("generated")
    if directory is not None and name in data.IN_DIRECTORIES:
        counts = [_classes(name, directory, split, val_fraction) for split in splits]
        return Glance(f"found in {directory}", counts[0])
    return _prepared(name, directory, splits)


def _digits(directory: Path | None) -> Glance:
    place = directory or shards.cache_root()
    if importlib.util.find_spec("sklearn") is None and not any(place.glob("digits-*")):
        raise UserError("--dataset=digits: needs scikit-learn (pip install scikit-learn)")
    return Glance(f"kept in {place}", 10)


def _classes(name: str, directory: Path, split: str, val_fraction: float) -> int | None:
    """Finds the files of a split in a directory; returns the number of classes where a listing shows it."""
    if name == "folder":
        from hybrid_imagenet.data.sources import folder

        return len(folder.find(directory, split, val_fraction)[1])
    if name == "tfrecord":
        manifest = shards.read_manifest(directory)
        shards.find(directory, split)
        return len(manifest["class_names"]) if manifest else None
    if name == "huggingface":
        from hybrid_imagenet.data.sources import huggingface

        huggingface.find(directory, split)
    elif name == "idx":
        from hybrid_imagenet.data.sources import idx

        idx.find(directory, split)
    else:
        from hybrid_imagenet.data.directories import LocalDirectory
        from hybrid_imagenet.data.sources import parquet, webdataset

        (parquet if name == "parquet" else webdataset).find(LocalDirectory(directory), split)
    return None


def _prepared(name: str, directory: Path | None, splits: tuple[str, ...]) -> Glance:
    if name == "fashion_mnist" and directory is not None:
        from hybrid_imagenet.data.sources import idx

        if idx.has_files(directory):
            for split in splits:
                idx.find(directory, split)
            return Glance(f"found in {directory}", len(idx.FASHION_MNIST))
    from hybrid_imagenet.data.sources import tfds

    found = [tfds.find(name, directory, split) for split in splits]
    return Glance(f"prepared in {found[0].files[0].parent}", len(found[0].class_names))
