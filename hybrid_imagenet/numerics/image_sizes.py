"""Reads schedules of the training images' size: small ones first cost less (Howard, fast.ai at DAWNBench, 2018)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

_ENTRY = re.compile(r"(\d+):(\d+)")


@dataclasses.dataclass(frozen=True)
class ImageSizes:
    """(first epoch, counted from 0; pixels) of each stage, in ascending order of epochs, the first at epoch 0."""

    stages: tuple[tuple[int, int], ...]

    def at(self, epoch: int) -> int:
        """The side of the network's input, in pixels, in an epoch counted from 0."""
        return [pixels for first, pixels in self.stages if first <= epoch][-1]


def parse(entries: Sequence[str], image_size: int, minimum: int = 8) -> ImageSizes:
    """Reads a schedule.

    Args:
      entries: EPOCH:PIXELS each; none at all gives `image_size` throughout.
      image_size: pixels before the first entry, where that is not at epoch 0.
      minimum: the least number of pixels.

    Raises:
      ValueError: one line that names the entry.
    """
    stages = [_stage(entry, minimum) for entry in entries]
    if not stages or stages[0][0] > 0:
        stages.insert(0, (0, image_size))
    for (before, _), (after, _) in itertools.pairwise(stages):
        if after <= before:
            raise ValueError(f"epoch {after} follows {before}: give the epochs in ascending order")
    return ImageSizes(tuple(stages))


def _stage(entry: str, minimum: int) -> tuple[int, int]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r}: give EPOCH:PIXELS, as in 0:128,18:160,28:224")
    epoch, pixels = (int(text) for text in match.groups())
    if pixels < minimum:
        raise ValueError(f"{entry!r}: an image needs at least {minimum} pixels")
    return epoch, pixels
