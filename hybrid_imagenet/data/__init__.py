"""Provides data sets: sources of encoded images, their order, decoding and augmentation."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.data.registry import SPLITS, Request
from hybrid_imagenet.data.sources.base import Source

__all__ = ["SPLITS", "Request", "Source", "open_source", "shard"]


def open_source(name: str, data_dir: str | None = None, split: str = "train", **options: Any) -> Source:
    """Opens one split of a data set.

    Args:
      name, data_dir, split, options: the attributes of `Request`.

    Raises:
      UserError: if there is no such data set or it cannot be used.
    """
    return Request(name, data_dir, split, **options).open()


def __getattr__(name: str) -> Any:
    """Imports `shard` at its first use: it needs TensorFlow, which sources do not."""
    if name != "shard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"{__name__}.rank_shards").shard
