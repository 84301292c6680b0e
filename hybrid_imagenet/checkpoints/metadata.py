"""Checks the description in a checkpoint, key by key: its form, and ranges that no run leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MAX_STEP = 999_999_999  # nine digits in the name of a file
HYPER_NAMES = ("learning_rate", "momentum", "phase", "lower_bound", "upper_bound", "lars_share")
_LARGEST = 1e300  # of a finite sum
_PIXELS = 65_536  # of a side

Check = Callable[[Any], bool]


class _Rule(NamedTuple):
    """The condition that a value must meet; `wanted` says it in words."""

    check: Check
    wanted: str
    needed: bool = True


def check_run(meta: Mapping[str, Any]) -> None:
    """Checks all that a run needs to go on.

    Args:
      meta: the description in a checkpoint.

    Raises:
      ValueError: naming the first value that is missing, of another form or impossible.
    """
    _apply(_RUN, meta)
    state = meta["state"]
    _apply(_STATE, state, "state.")
    _apply(_CURSOR, state["cursor"], "state.cursor.")
    if "order" in meta:
        _apply(_ORDER, meta["order"], "order.")
    begun, finished, step = state["cursor"]["epoch"], state["finished_epochs"], state["step"]
    if not finished <= begun <= finished + 1 or begun > step:  # a step takes no more examples than an epoch has
        raise ValueError(f"state.cursor.epoch is {begun}, after {step} steps and {finished} finished epochs")
    for name in ("epoch_sums", "square_norms"):
        if len(meta[name]) != meta["world_size"]:
            raise ValueError(f"{name} has {len(meta[name])} rows for {meta['world_size']} ranks")
    check_network(meta)


def check_network(meta: Mapping[str, Any]) -> None:
    """Checks what describes a trained network, as far as it is there.

    Raises:
      ValueError: as `check_run`.
    """
    _apply(_NETWORK, meta)
    names, classes = meta.get("class_names"), meta.get("num_classes")
    if names is not None and classes is not None and len(names) != classes:
        raise ValueError(f"class_names has {len(names)} names for {classes} classes")


def _apply(rules: Mapping[str, _Rule], values: Mapping[str, Any], prefix: str = "") -> None:
    for name, rule in rules.items():
        if name not in values:
            if rule.needed:
                raise ValueError(f"{prefix}{name} is missing")
        elif not rule.check(values[name]):
            shown = repr(values[name])
            raise ValueError(f"{prefix}{name} is {shown if len(shown) < 40 else shown[:40] + '...'}, not {rule.wanted}")


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Returns whether a value is a number from `low` to `high`; NaN lies nowhere."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _number(low: float, high: float) -> _Rule:
    return _Rule(lambda value: _is_number(value, low, high), f"a number from {low:g} to {high:g}")


def _whole(low: int, high: int, *, needed: bool = True) -> _Rule:
    wanted = f"a whole number from {low} to {high}"
    return _Rule(lambda value: isinstance(value, int) and _is_number(value, low, high), wanted, needed)


def _optional(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.check(value), rule.wanted, needed=False)


def _rows(columns: int) -> _Rule:
    """Accepts, for each rank, a sum of losses, not finite if one of them was not, and sums that are not negative."""

    def check(rows: Any) -> bool:
        return isinstance(rows, list) and all(
            isinstance(row, list)
            and len(row) == columns
            and isinstance(row[0], (int, float))
            and all(_is_number(value, 0, _LARGEST) for value in row[1:])
            for row in rows
        )

    return _Rule(check, f"{columns} numbers for each rank")


def _is_hyper(value: Any) -> bool:
    """Returns the schedule's values, or none before the first step; an upper bound may be infinite."""
    if not isinstance(value, dict) or (value and "phase" not in value):
        return False
    return all(name in HYPER_NAMES and _is_number(number) for name, number in value.items())


def _is_objects(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _colours(low: float) -> _Rule:
    def check(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 3 and all(_is_number(v, low, _LARGEST) for v in value)

    return _Rule(check, "three numbers, for red, green and blue", needed=False)


_FRACTION = _number(0, 1)
_STEPS = _whole(0, MAX_STEP)
_RUN: Mapping[str, _Rule] = {
    "state": _Rule(lambda value: isinstance(value, dict), "an object"),
    "world_size": _whole(1, 1_000_000),
    "epoch_sums": _rows(4),
    "square_norms": _rows(3),
    "val_top1": _optional(_FRACTION),
    "order": _Rule(lambda value: isinstance(value, dict), "an object", needed=False),
    "data": _Rule(_is_objects, "an object of objects", needed=False),
}
_STATE: Mapping[str, _Rule] = {
    "cursor": _Rule(lambda value: isinstance(value, dict), "an object"),
    "step": _STEPS,
    "images": _whole(0, 2**62),
    "finished_epochs": _STEPS,
    "seconds": _number(0, 1e10),
    "best_top1": _FRACTION,
    "closed_at": _number(0, MAX_STEP),
    "best_epoch": _number(0, MAX_STEP),
    "hyper": _Rule(_is_hyper, "the values of a schedule by name"),
}
_CURSOR: Mapping[str, _Rule] = {"epoch": _STEPS, "offset": _whole(0, 2**62)}
_ORDER: Mapping[str, _Rule] = {
    "seed": _whole(0, 2**64),
    "shuffle_window": _whole(0, 2**62),
}
_NETWORK: Mapping[str, _Rule] = {
    "model": _Rule(_is_text, "the name of a network", needed=False),
    "num_classes": _whole(1, 10**7, needed=False),
    "class_names": _Rule(_is_names, "a list of names", needed=False),
    "image_size": _whole(1, _PIXELS, needed=False),
    "width": _whole(1, _PIXELS, needed=False),
    "stem": _Rule(_is_text, "the name of a stem", needed=False),
    "blurpool": _Rule(lambda value: isinstance(value, bool), "true or false", needed=False),
    "crop_fraction": _optional(_number(1e-6, 1)),
    "batch_norm_epsilon": _optional(_number(0, 1)),
    "pixel_mean": _colours(-_LARGEST),
    "pixel_deviation": _colours(1e-12),
    "stride_in_1x1": _Rule(lambda value: isinstance(value, bool), "true or false", needed=False),
    "averaged": _Rule(lambda value: isinstance(value, bool), "true or false", needed=False),
}
