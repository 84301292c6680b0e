"""Counts the examples of each epoch that the trainer received, and those that others replaced."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Count:
    """Examples of an epoch that were used as they are, and those that were dropped."""

    used: int = 0
    dropped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.used + other.used, self.dropped + other.dropped)


Sheet = dict[int, dict[int, Count]]
"""What micro-batches hold: by their number, the counts by epoch."""


class Tally:
    """Counts by epoch what each micro-batch holds, at the moment when it is handed over.

    Micro-batches are read ahead by several threads, and again after an image that did not decode. Who reads takes the
    sheet before it and writes there; a late note of a reading that has been given up goes to a sheet that nobody reads.

    Attributes:
      sheet: for what is being read.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all counts."""
        self.read_again()
        self._counts: dict[int, Count] = {}

    def read_again(self) -> None:
        """Forgets what was read but not handed over."""
        self.sheet: Sheet = {}

    def deliver(self, number: int) -> None:
        """Counts a micro-batch of the sheet."""
        for epoch, count in self.sheet.pop(number).items():
            self._counts[epoch] = self.of(epoch) + count

    def of(self, epoch: int) -> Count:
        """Returns the examples of an epoch so far."""
        return self._counts.get(epoch, Count())

    def since(self, epoch: int) -> dict[int, Count]:
        """Returns the examples of this epoch and later ones so far."""
        return {number: count for number, count in self._counts.items() if number >= epoch}


def counts(epochs: npt.NDArray[np.int64], wanted: npt.NDArray[np.bool], own: npt.NDArray[np.bool]) -> dict[int, Count]:
    """Counts the examples of a micro-batch, by epoch.

    Args:
      epochs: of its examples, int64 [b].
      wanted: the examples that count, bool [b]; the others are padding.
      own: whether each is there itself, bool [b]; else another took its place.
    """
    parts = {int(epoch): wanted & (epochs == epoch) for epoch in np.unique(epochs)}
    return {epoch: Count(int((here & own).sum()), int((here & ~own).sum())) for epoch, here in parts.items()}
