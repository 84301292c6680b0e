"""Chooses the unit in which values are best read."""

from __future__ import annotations

_TIMES = ((2.0 * 3600, 3600.0, "hours"), (2 * 60.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_BYTES = ((1e9, 1e9, "GB/s"), (1e6, 1e6, "MB/s"), (0.0, 1e3, "kB/s"))


def time(seconds: float) -> tuple[float, str]:
    """The seconds in the unit that suits the longest of several times, and its name."""
    return _chosen(_TIMES, seconds)


def bandwidth(bytes_per_second: float) -> tuple[float, str]:
    """The bytes per second in the unit that suits the largest of several rates, and its name."""
    return _chosen(_BYTES, bytes_per_second)


def _chosen(choices: tuple[tuple[float, float, str], ...], largest: float) -> tuple[float, str]:
    return next((divisor, name) for least, divisor, name in choices if largest >= least)
