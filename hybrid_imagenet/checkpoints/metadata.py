"""Checks the description in a checkpoint: that a run can continue from it, and that its network can be built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hybrid_imagenet.checkpoints.run_state import RunState

_LARGEST = 1e300  # of a finite sum
_PIXELS = 65_536  # of a side

Check = Callable[[Any], bool]


class _Rule(NamedTuple):
    """The condition that a value must meet; `wanted` says it in words."""

    check: Check
    wanted: str


def check_run(meta: Mapping[str, Any]) -> None:
    """Checks that a run can continue from a checkpoint: its checksums have told that nothing was altered.

    Args:
      meta: the description in a checkpoint.

    Raises:
      ValueError: naming what is missing, or of the form of another version.
    """
    for name in ("state", "world_size", "epoch_sums", "square_norms"):
        if name not in meta:
            raise ValueError(f"{name} is missing")
    try:
        RunState.from_dict(meta["state"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"state is not that of a run ({' '.join(str(error).split())})") from None
    for name in ("epoch_sums", "square_norms"):
        if not isinstance(meta[name], list) or len(meta[name]) != meta["world_size"]:
            raise ValueError(f"{name} has no row for each of {meta['world_size']} ranks")
    check_network(meta)


def check_network(meta: Mapping[str, Any]) -> None:
    """Checks what describes a trained network, as far as it is there.

    Raises:
      ValueError: as `check_run`.
    """
    for name, rule in _NETWORK.items():
        if name in meta and not rule.check(meta[name]):
            shown = repr(meta[name])
            shown = shown if len(shown) < 40 else shown[:40] + "..."
            raise ValueError(f"{name} is {shown}, not {rule.wanted}")
    names, classes = meta.get("class_names"), meta.get("num_classes")
    if names is not None and classes is not None and len(names) != classes:
        raise ValueError(f"class_names has {len(names)} names for {classes} classes")


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Returns whether a value is a number from `low` to `high`; NaN lies nowhere."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float) -> _Rule:
    return _Rule(lambda value: _is_number(value, low, high), f"a number from {low:g} to {high:g}")


def _whole(low: int, high: int) -> _Rule:
    wanted = f"a whole number from {low} to {high}"
    return _Rule(lambda value: isinstance(value, int) and _is_number(value, low, high), wanted)


def _optional(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.check(value), rule.wanted)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _colours(low: float) -> _Rule:
    def check(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 3 and all(_is_number(v, low, _LARGEST) for v in value)

    return _Rule(check, "three numbers, for red, green and blue")


_NETWORK: Mapping[str, _Rule] = {
    "model": _Rule(_is_text, "the name of a network"),
    "num_classes": _whole(1, 10**7),
    "class_names": _Rule(_is_names, "a list of names"),
    "image_size": _whole(1, _PIXELS),
    "width": _whole(1, _PIXELS),
    "stem": _Rule(_is_text, "the name of a stem"),
    "blurpool": _Rule(lambda value: isinstance(value, bool), "true or false"),
    "crop_fraction": _optional(_number(1e-6, 1)),
    "batch_norm_epsilon": _optional(_number(0, 1)),
    "pixel_mean": _colours(-_LARGEST),
    "pixel_deviation": _colours(1e-12),
    "stride_in_1x1": _Rule(lambda value: isinstance(value, bool), "true or false"),
    "averaged": _Rule(lambda value: isinstance(value, bool), "true or false"),
}
