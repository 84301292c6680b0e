"""Provides data sets: sources of encoded images, their order, decoding and augmentation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.errors import UserError

if TYPE_CHECKING:
    from hybrid_imagenet.data.directories import Directory

__all__ = ["SPLITS", "Source", "open_source", "shard"]
SPLITS = ("train", "validation")
FROM_STORAGE = ("webdataset", "parquet")
"""Datasets that can lie at a URL."""
IN_DIRECTORIES = ("tfrecord", "folder", "huggingface", "idx", *FROM_STORAGE)


def open_source(
    name: str,
    data_dir: str | None = None,
    split: str = "train",
    *,
    num_classes: int | None = None,
    num_examples: int | None = None,
    ignore_damage: bool = False,
    memory_bytes: int = 1 << 30,
    cache: str = "none",
    cache_dir: str | None = None,
    val_fraction: float = 0.0,
    storage_timeout: float = 120.0,
) -> Source:
    """Opens one split of a data set.

    Args:
      name: `digits`, `synthetic` (JPEGs), `synthetic_tensors` (pixels that are ready), `tfrecord`, `folder`,
        `webdataset`, `parquet`, `huggingface` (what `save_to_disk` wrote), `idx`, `fashion_mnist` (IDX files, or TFDS),
        or the name of a TFDS image classification set.
      data_dir: where it lies; for `digits` where it is written, by default the user's cache. For `webdataset` and
        `parquet` also a URL, which needs `cache_dir`.
      split: "train" or "validation".
      num_classes: of synthetic images, or of shards that do not tell.
      num_examples: of the training split of a synthetic set.
      ignore_damage: use the readable part of damaged shards.
      memory_bytes: bound on what is kept in memory: Parquet row groups, or the cache.
      cache: "encoded" or "decoded" keeps images that were read once, as they are or as pixels; "none" keeps nothing.
      val_fraction: of a folder without a validation split: the part of each class that is validated.
      cache_dir: keeps them on disk there instead of in memory, as far as its file system has room; and copies of the
        files of a URL.
      storage_timeout: seconds for which a URL that fails is tried again.

    Raises:
      UserError: if there is no such data set or it cannot be used.
    """
    check_place(name, data_dir, cache_dir, val_fraction)
    if data_dir and name in FROM_STORAGE:
        from hybrid_imagenet.data import storage

        place = storage.open_directory(data_dir, cache_dir, storage_timeout)
        source = _open_stored(name, place, split, num_classes, ignore_damage, memory_bytes)
    else:
        directory = Path(data_dir).expanduser() if data_dir else None
        source = _open(name, directory, split, num_classes, num_examples, ignore_damage, val_fraction)
    if cache == "none" or source.ready or source.side is not None:  # the last has all pixels in memory
        return source
    from hybrid_imagenet.data.cache import CachedSource

    kept = Path(cache_dir).expanduser() if cache_dir else None
    return CachedSource(source, cache, _room(kept) if kept else memory_bytes, kept)


def check_place(name: str, data_dir: str | None, cache_dir: str | None = None, val_fraction: float = 0.0) -> None:
    """Checks what is wrong with the place of a dataset whatever lies there; arguments as for `open_source`.

    Raises:
      UserError: for a directory or URL that is missing, or does not go with the dataset.
    """
    if val_fraction and name != "folder":
        raise UserError(
            f"--val_fraction={val_fraction:g} goes with --dataset=folder, not {name}: leave it out, or use "
            f"--tuning_split={val_fraction:g}"
        )
    if not data_dir and name in IN_DIRECTORIES:
        raise UserError(f"--dataset={name}: give the directory where it lies as --data_dir")
    if data_dir and name in FROM_STORAGE:
        from hybrid_imagenet.data import storage

        storage.check(data_dir, cache_dir)
    elif data_dir and "://" in data_dir and name != "huggingface":  # which says why it does not stream
        raise UserError(f"--data_dir={data_dir}: URLs go with --dataset={' and '.join(FROM_STORAGE)}, not {name}")


def _room(directory: Path) -> int:
    """Returns the bytes that may be stored in a directory: nine tenths of what its file system has free."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free * 9 // 10


def _open(
    name: str,
    directory: Path | None,
    split: str,
    num_classes: int | None,
    num_examples: int | None,
    ignore_damage: bool,
    val_fraction: float,
) -> Source:
    if directory is not None and name in IN_DIRECTORIES:
        if name == "folder":
            from hybrid_imagenet.data.sources import folder

            return folder.FolderSource(directory, split, val_fraction)
        return _open_files(name, directory, split, num_classes, ignore_damage)
    if name == "digits":
        from hybrid_imagenet.data.sources import digits

        return digits.open_digits(directory, split)
    if name in ("synthetic", "synthetic_tensors"):
        from hybrid_imagenet.data.sources import synthetic

        return synthetic.SyntheticSource(split, num_examples, num_classes, ready=name == "synthetic_tensors")
    if name == "fashion_mnist" and directory is not None:
        from hybrid_imagenet.data.sources import idx

        if idx.has_files(directory):
            return idx.IdxSource(directory, split, idx.FASHION_MNIST)
    from hybrid_imagenet.data.sources import tfds

    return tfds.open_tfds(name, directory, split, ignore_damage=ignore_damage)


def _open_stored(
    name: str,
    directory: Directory,
    split: str,
    num_classes: int | None,
    ignore_damage: bool,
    memory_bytes: int,
) -> Source:
    if name == "webdataset":
        from hybrid_imagenet.data.sources import webdataset

        return webdataset.WebDatasetSource(directory, split, num_classes, ignore_damage=ignore_damage)
    from hybrid_imagenet.data.sources import parquet

    return parquet.ParquetSource(directory, split, num_classes, memory_bytes)


def _open_files(name: str, directory: Path, split: str, num_classes: int | None, ignore_damage: bool) -> Source:
    if name == "idx":
        from hybrid_imagenet.data.sources import idx

        return idx.IdxSource(directory, split)
    if name == "huggingface":
        from hybrid_imagenet.data.sources import huggingface

        return huggingface.HuggingFaceSource(directory, split, num_classes)
    from hybrid_imagenet.data.sources import tfrecord

    return tfrecord.open_directory(directory, split, num_classes=num_classes, ignore_damage=ignore_damage)


def __getattr__(name: str) -> Any:
    """Imports `shard` at its first use: it needs TensorFlow, which sources do not."""
    if name != "shard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"{__name__}.rank_shards").shard
