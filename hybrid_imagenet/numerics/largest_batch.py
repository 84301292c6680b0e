"""Finds the largest batch whose memory fits, with few trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping

STEP = 8  # batches are multiples of it, which tensor cores and vector units like
_GROWTH = 4  # an extrapolation is not followed further than by this factor


def search(measure: Callable[[int], float | None], limit: float, most: int) -> tuple[int, dict[int, float | None]]:
    """The largest batch up to `most` whose peak memory is at most `limit`; a multiple of 8, unless that is too much.

    Grows from 8 by doubling and, once two peaks are known, to where the line through the last two meets the limit
    (activations are proportional to the batch); then narrows down. What it returns was tried, and so was the next
    larger multiple of 8, unless it is beyond `most`.

    Args:
      measure: peak memory of a training step with a batch, in bytes; None if memory did not suffice.
      limit: bytes.
      most: the largest batch of interest, at least 1.

    Returns:
      The batch, 0 if not even one image fits; and the peak of each batch that was tried.
    """
    if most >= STEP:
        most -= most % STEP
    peaks: dict[int, float | None] = {}
    low, high = 0, most + 1  # the first fits, the second does not
    candidate: int | None = min(STEP, most)
    while candidate is not None:
        peak = peaks[candidate] = measure(candidate)
        if peak is not None and peak <= limit:
            low = candidate
        else:
            high = candidate
        candidate = _next(low, high, limit, peaks)
    return low, peaks


def _next(low: int, high: int, limit: float, peaks: Mapping[int, float | None]) -> int | None:
    """The next batch to try between one that fits and one that does not; None if there is none."""
    if high <= STEP:
        return (low + high) // 2 if high - low > 1 else None
    top = (high - 1) // STEP * STEP
    if top <= low:
        return None
    guess = min(_crossing(low, high, limit, peaks), _GROWTH * low)
    return min(max(int(guess) // STEP * STEP, low + STEP), top)


def _crossing(low: int, high: int, limit: float, peaks: Mapping[int, float | None]) -> float:
    """Estimates the batch that fills the limit from the two nearest peaks; without two, twice `low` or the middle."""
    if high in peaks and peaks[high] is None:
        return (low + high) / 2
    known = sorted((batch, peak) for batch, peak in peaks.items() if peak is not None and batch <= high)
    if len(known) < 2:
        return 2.0 * low
    (first, less), (second, more) = known[-2:]
    if more <= less:
        return 2.0 * low
    return first + (limit - less) * (second - first) / (more - less)
