"""Tells whether two sources hold the same images, by what is known without reading one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

_CHUNK = 1 << 16  # names that are joined at a time
_OTHERS = ("class names", "sizes of shards", "file names")


def identity(
    images: int, class_names: Sequence[str], shard_sizes: npt.NDArray[Any] | None, listing: Sequence[str]
) -> dict[str, Any]:
    """Returns what must be equal where the same images are read in the same order, JSON-ready.

    Args:
      images: their number.
      class_names: in the order of the labels.
      shard_sizes: see `Source.shard_sizes`.
      listing: see `Source.listing`.
    """
    sizes = [] if shard_sizes is None else [str(size) for size in shard_sizes.tolist()]
    return {"images": images} | dict(zip(_OTHERS, map(_digest, (class_names, sizes, listing)), strict=True))


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Returns in which parts the first of two identities differs from the second; empty where in none."""
    parts = []
    if one.get("images") != other.get("images"):
        parts.append(f"{one.get('images')} images instead of {other.get('images')}")
    parts += [f"other {part}" for part in _OTHERS if one.get(part) != other.get(part)]
    return ", ".join(parts)


def _digest(names: Sequence[str]) -> str:
    found = hashlib.sha256(str(len(names)).encode())
    for start in range(0, len(names), _CHUNK):
        found.update("\0".join(["", *names[start : start + _CHUNK]]).encode("utf-8", "surrogateescape"))
    return found.hexdigest()[:16]
