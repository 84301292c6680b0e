"""Computes the ticks of an axis and the coordinates of values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` in values, drawn from `start` to `end`; logarithmic if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value; values outside are moved to the nearer end."""
        return self.beyond(min(max(value, self.low), self.high))

    def beyond(self, value: float) -> float:
        """The coordinate of a value, also outside of the axis."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values on the axis: about `count` on a linear one, powers of ten (or 1, 2, 5) on a logarithmic one."""
        return _log_ticks(self.low, self.high, count) if self.log else _linear_ticks(self.low, self.high, count)


def fit(values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale that holds all values, with a margin on a linear axis; `zero` makes a linear one begin at 0.

    On a logarithmic scale only positive values count.
    """
    chosen = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(chosen), max(chosen)) if chosen else (1.0, 1.0)
    if log:
        return Scale(low / 1.5, high * 1.5, start, end, log=True)
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(min(low, 0.0) if zero else low - margin, high + margin, start, end)


def span(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale from 0 (or the least value, if negative) to exactly the largest, for epochs and times."""
    high = max(values, default=1.0)
    return Scale(min(0.0, min(values, default=0.0)), high if high > 0 else 1.0, start, end)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(powers) >= 2:
        stride = math.ceil(len(powers) / (count + 1))
        return powers[::stride]
    return [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]


def label(value: float) -> str:
    """A tick's label: 0.25, 1,500, 2e-5."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
