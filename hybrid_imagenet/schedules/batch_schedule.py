"""Reads schedules of the batch and of the size of training images, which change at given epochs.

Batches follow Mikami et al. §2.1 (batch-size control). A worker takes `accumulation` micro-batches
of `per_gpu_batch` images per update. Batch normalization sees the micro-batch; learning rate and
momentum follow the global batch. Small images first cost less (Howard, fast.ai at DAWNBench, 2018).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

PRESETS: dict[str, tuple[tuple[int, Fraction, int], ...]] = {
    "flash_exp1": ((0, Fraction(1), 1), (30, Fraction(2), 2)),
    "flash_exp2": ((0, Fraction(1), 1),),
    "flash_exp3": ((0, Fraction(1), 1), (30, Fraction(65536, 55296), 2)),
    "flash_exp4": (
        (0, Fraction(1), 1),
        (30, Fraction(2), 2),
        (45, Fraction(5, 2), 2),
        (75, Fraction(7, 2), 2),
    ),
}
"""Mikami et al., Table 3: epoch, factor of the first batch, and micro-batches where growth is by
accumulation.

They are factors because the paper changes the number of workers and we do not. On 2176 workers,
experiment 4 with 16 images each is 34816, 69632, 87040 and 121856 images; experiment 3 goes from
55296 to 65536, so the first batch of a worker must be a multiple of 27. No worker has more than 32
images in the paper, which two micro-batches keep to.
"""
_SIZE = re.compile(r"(\d+):(\d+)")
_LEAST_PIXELS = 8
_ENTRY = re.compile(r"(\d+):(?:(\d+)(?:x(\d+))?|\*(\d+(?:\.\d+)?))")


@dataclasses.dataclass(frozen=True)
class BatchStage:
    """The batch from an epoch (counted from 0) on."""

    epoch: int
    per_gpu_batch: int
    accumulation: int = 1

    @property
    def images(self) -> int:
        """Images of one worker per update."""
        return self.per_gpu_batch * self.accumulation

    def global_batch(self, workers: int) -> int:
        """Images of all workers per update."""
        return self.images * workers


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """Stages in ascending order of epochs, the first at epoch 0."""

    stages: tuple[BatchStage, ...]

    def at(self, epoch: int) -> BatchStage:
        """The stage of an epoch counted from 0."""
        return [stage for stage in self.stages if stage.epoch <= epoch][-1]


def parse_batches(
    entries: Sequence[str],
    per_gpu_batch: int,
    accumulation: int = 1,
    growth: str = "per_gpu",
    epochs: float | None = None,
) -> BatchSchedule:
    """Reads a batch schedule.

    Args:
      entries: a single name of `PRESETS`, or entries EPOCH:IMAGES, EPOCH:IMAGESxACCUMULATION or
        EPOCH:*FACTOR, where IMAGES counts one worker and micro-batch, and FACTOR multiplies the
        first batch. None at all gives one stage.
      per_gpu_batch: images of one worker and micro-batch at epoch 0.
      accumulation: micro-batches per update, where an entry says nothing else.
      growth: what a factor enlarges: the batch of a worker, or the number of micro-batches, which
        then stay as close below their first size as they divide evenly, or in a preset as large as
        the paper's.
      epochs: length of the run; entries behind it are left out.

    Raises:
      ValueError: one line that names the entry.
    """
    first = BatchStage(0, per_gpu_batch, accumulation)
    if len(entries) == 1 and entries[0] in PRESETS:
        stages = [
            _enlarged(first, epoch, factor, growth, entries[0], micro)
            for epoch, factor, micro in PRESETS[entries[0]]
        ]
    else:
        stages = []
        for entry in entries:
            stages.append(_stage(entry, first, growth))
            if stages[0].epoch == 0 and "*" not in entries[0]:
                first = stages[0]
    if not stages or stages[0].epoch > 0:
        stages.insert(0, first)
    _check_ascending([stage.epoch for stage in stages])
    return BatchSchedule(tuple(s for s in stages if epochs is None or s.epoch < epochs))


def _stage(entry: str, first: BatchStage, growth: str) -> BatchStage:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        known = ", ".join(PRESETS)
        raise ValueError(
            f"{entry!r}: give EPOCH:IMAGES, EPOCH:IMAGESxACCUMULATION, EPOCH:*FACTOR or one of"
            f" {known}"
        )
    epoch, images, micro_batches, factor = match.groups()
    if factor is not None:
        return _enlarged(first, int(epoch), Fraction(factor), growth, entry)
    stage = BatchStage(int(epoch), int(images), int(micro_batches or first.accumulation))
    if stage.images == 0:
        raise ValueError(f"{entry!r}: a batch needs at least one image")
    return stage


def _enlarged(
    first: BatchStage,
    epoch: int,
    factor: Fraction,
    growth: str,
    entry: str,
    accumulation: int | None = None,
) -> BatchStage:
    """The stage whose worker takes `factor` times as many images per update as `first`.

    Growth by accumulation takes `accumulation` times as many micro-batches; None takes the fewest
    that stay at or below the first size.
    """
    images = first.images * factor
    if images.denominator != 1 or images == 0:
        raise ValueError(
            f"{entry!r}: {factor} times {first.images} images is not a whole number: let"
            f" --per_gpu_batch be a multiple of {factor.denominator}"
        )
    if factor == 1:
        return dataclasses.replace(first, epoch=epoch)
    total = int(images)
    if growth == "per_gpu":
        if total % first.accumulation:
            raise ValueError(
                f"{entry!r}: {total} images cannot be split into {first.accumulation} micro-batches"
            )
        return BatchStage(epoch, total // first.accumulation, first.accumulation)
    least = (
        -(-total // first.per_gpu_batch)
        if accumulation is None
        else accumulation * first.accumulation
    )
    micro_batches = next(k for k in range(least, total + 1) if total % k == 0)
    return BatchStage(epoch, total // micro_batches, micro_batches)


@dataclasses.dataclass(frozen=True)
class ImageSizes:
    """(first epoch, counted from 0; pixels) of each stage, in ascending order of epochs, the first
    at epoch 0.
    """

    stages: tuple[tuple[int, int], ...]

    def at(self, epoch: int) -> int:
        """The side of the network's input, in pixels, in an epoch counted from 0."""
        return [pixels for first, pixels in self.stages if first <= epoch][-1]


def parse_sizes(entries: Sequence[str], image_size: int) -> ImageSizes:
    """Reads a schedule.

    Args:
      entries: EPOCH:PIXELS each; none at all gives `image_size` throughout.
      image_size: pixels before the first entry, where that is not at epoch 0.

    Raises:
      ValueError: one line that names the entry.
    """
    stages = [_size(entry) for entry in entries]
    if not stages or stages[0][0] > 0:
        stages.insert(0, (0, image_size))
    _check_ascending([epoch for epoch, _ in stages])
    return ImageSizes(tuple(stages))


def _size(entry: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r}: give EPOCH:PIXELS, as in 0:128,18:160,28:224")
    epoch, pixels = (int(text) for text in match.groups())
    if pixels < _LEAST_PIXELS:
        raise ValueError(f"{entry!r}: an image needs at least {_LEAST_PIXELS} pixels")
    return epoch, pixels


def _check_ascending(epochs: Sequence[int]) -> None:
    for before, after in itertools.pairwise(epochs):
        if after <= before:
            raise ValueError(f"epoch {after} follows {before}: give the epochs in ascending order")
