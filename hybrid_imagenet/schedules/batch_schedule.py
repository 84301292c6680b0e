"""Parses schedules of the batch and of the image size, which change at given epochs.

Batches follow Mikami et al. §2.1 (batch-size control). Per update a worker takes `accumulation`
micro-batches of `per_gpu_batch` images. Batch normalization sees the micro-batch; learning rate and
momentum follow the global batch. Starting with small images costs less (Howard, fast.ai at
DAWNBench, 2018).
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
"""Mikami et al., Table 3: epoch, factor on the first batch, and micro-batches under accumulation.

They are factors because the paper changes the number of workers and we do not. On 2176 workers,
experiment 4 with 16 images each is 34816, 69632, 87040 and 121856 images. Experiment 3 goes from
55296 to 65536, so the first batch of a worker must be a multiple of 27. No worker in the paper has
more than 32 images, which two micro-batches keep to.
"""
_BATCH_ENTRY = re.compile(r"(\d+):(?:(\d+)(?:x(\d+))?|\*(\d+(?:\.\d+)?))")
_SIZE_ENTRY = re.compile(r"(\d+):(\d+)")
_MIN_PIXELS = 8

# Larger values are mistakes, with which a run would exhaust memory or work on its first step for
# hours without a message.
MAX_PIXELS = 8192
"""Largest side of the network's input."""
MAX_BATCH = 1 << 16
"""Largest number of images of a worker and micro-batch."""
MAX_MICRO_BATCHES = 1 << 16
"""Largest number of micro-batches per update."""


@dataclasses.dataclass(frozen=True)
class BatchStage:
    """Holds the batch that is used from an epoch on.

    Attributes:
      epoch: First epoch of the stage, from 0.
      per_gpu_batch: Images of one worker per micro-batch.
      accumulation: Micro-batches per update.
    """

    epoch: int
    per_gpu_batch: int
    accumulation: int = 1

    @property
    def images(self) -> int:
        """Images of one worker per update."""
        return self.per_gpu_batch * self.accumulation

    def global_batch(self, workers: int) -> int:
        """Returns the images of all workers per update."""
        return self.images * workers


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """Holds stages in ascending order of epochs, the first at epoch 0."""

    stages: tuple[BatchStage, ...]

    def at(self, epoch: int) -> BatchStage:
        """Returns the stage of an epoch, counted from 0."""
        return [stage for stage in self.stages if stage.epoch <= epoch][-1]


def parse_batches(
    entries: Sequence[str],
    per_gpu_batch: int,
    accumulation: int = 1,
    growth: str = "per_gpu",
    epochs: float | None = None,
) -> BatchSchedule:
    """Parses a batch schedule.

    Args:
      entries: A single name of `PRESETS`, or entries EPOCH:IMAGES, EPOCH:IMAGESxACCUMULATION or
        EPOCH:*FACTOR. IMAGES counts one worker and micro-batch; FACTOR multiplies the first batch.
        No entries give one stage.
      per_gpu_batch: Images of one worker and micro-batch at epoch 0.
      accumulation: Micro-batches per update, unless an entry sets them.
      growth: What a factor enlarges: `per_gpu`, the batch of a worker, or `accumulation`, the
        number of micro-batches. Micro-batches then stay as close below their first size as they
        divide evenly, or in a preset as large as those in the paper.
      epochs: Length of the run; later entries are ignored.

    Raises:
      ValueError: For an invalid entry; the message is one line that names it.
    """
    first = BatchStage(0, per_gpu_batch, accumulation)
    if len(entries) == 1 and entries[0] in PRESETS:
        stages = [
            _enlarge(first, epoch, factor, growth, entries[0], micro_batches)
            for epoch, factor, micro_batches in PRESETS[entries[0]]
        ]
    else:
        stages = []
        for entry in entries:
            stages.append(_parse_stage(entry, first, growth))
            # Factors refer to the first batch, which an entry for epoch 0 may set.
            if stages[0].epoch == 0 and "*" not in entries[0]:
                first = stages[0]
    if not stages or stages[0].epoch > 0:
        stages.insert(0, first)
    _check_ascending([stage.epoch for stage in stages])
    return BatchSchedule(tuple(stage for stage in stages if epochs is None or stage.epoch < epochs))


def last_epoch(entries: Sequence[str]) -> int:
    """Returns the epoch of the last stage of valid entries, whether a run reaches it or not."""
    if not entries:
        return 0
    if entries[0] in PRESETS:
        return PRESETS[entries[0]][-1][0]
    return int(entries[-1].partition(":")[0])


def _parse_stage(entry: str, first: BatchStage, growth: str) -> BatchStage:
    match = _BATCH_ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(
            f"{entry!r}: use EPOCH:IMAGES, EPOCH:IMAGESxACCUMULATION, EPOCH:*FACTOR or one of"
            f" {', '.join(PRESETS)}"
        )
    epoch, images, micro_batches, factor = match.groups()
    if factor is not None:
        return _enlarge(first, int(epoch), Fraction(factor), growth, entry)
    stage = BatchStage(int(epoch), int(images), int(micro_batches or first.accumulation))
    if stage.images == 0:
        raise ValueError(f"{entry!r}: a batch needs at least one image")
    _check_not_too_large(stage, entry)
    return stage


def _check_not_too_large(stage: BatchStage, entry: str) -> None:
    if stage.per_gpu_batch > MAX_BATCH:
        raise ValueError(f"{entry!r}: a batch has at most {MAX_BATCH} images")
    if stage.accumulation > MAX_MICRO_BATCHES:
        raise ValueError(f"{entry!r}: an update has at most {MAX_MICRO_BATCHES} micro-batches")


def _enlarge(
    first: BatchStage,
    epoch: int,
    factor: Fraction,
    growth: str,
    entry: str,
    accumulation_factor: int | None = None,
) -> BatchStage:
    """Returns a stage with `factor` times the images per update of `first`.

    Args:
      first: The first stage.
      epoch: First epoch of the result.
      factor: On the images per update of a worker.
      growth: See `parse_batches`.
      entry: The entry, for messages.
      accumulation_factor: For growth by accumulation, at least this many times the micro-batches of
        `first`. None uses the fewest that are not larger than those of `first`.
    """
    images = first.images * factor
    if images.denominator != 1 or images == 0:
        raise ValueError(
            f"{entry!r}: {factor} times {first.images} images is not a whole number. Set"
            f" --per_gpu_batch to a multiple of {factor.denominator}."
        )
    if factor == 1:
        return dataclasses.replace(first, epoch=epoch)
    total = int(images)
    if growth == "per_gpu":
        if total % first.accumulation:
            raise ValueError(
                f"{entry!r}: {total} images cannot be split into {first.accumulation} micro-batches"
            )
        stage = BatchStage(epoch, total // first.accumulation, first.accumulation)
        _check_not_too_large(stage, entry)
        return stage
    if accumulation_factor is None:
        min_micro_batches = -(-total // first.per_gpu_batch)
    else:
        min_micro_batches = accumulation_factor * first.accumulation
    # Before the search, which would take forever.
    _check_not_too_large(BatchStage(epoch, first.per_gpu_batch, min_micro_batches), entry)
    micro_batches = next(
        number for number in range(min_micro_batches, total + 1) if total % number == 0
    )
    stage = BatchStage(epoch, total // micro_batches, micro_batches)
    _check_not_too_large(stage, entry)
    return stage


@dataclasses.dataclass(frozen=True)
class ImageSizes:
    """Holds the image size of each stage.

    Attributes:
      stages: (first epoch, from 0; pixels) of each stage, in ascending order of epochs, the first
        at epoch 0.
    """

    stages: tuple[tuple[int, int], ...]

    def at(self, epoch: int) -> int:
        """Returns the side of the network's input in pixels in an epoch, counted from 0."""
        return [pixels for first, pixels in self.stages if first <= epoch][-1]


def parse_sizes(entries: Sequence[str], image_size: int) -> ImageSizes:
    """Parses a schedule of the image size.

    Args:
      entries: EPOCH:PIXELS each. No entries give `image_size` in all epochs.
      image_size: Pixels before the first entry, if that is not for epoch 0.

    Raises:
      ValueError: For an invalid entry; the message is one line that names it.
    """
    stages = [_parse_size(entry) for entry in entries]
    if not stages or stages[0][0] > 0:
        stages.insert(0, (0, image_size))
    _check_ascending([epoch for epoch, _ in stages])
    return ImageSizes(tuple(stages))


def _parse_size(entry: str) -> tuple[int, int]:
    match = _SIZE_ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r}: use EPOCH:PIXELS, as in 0:128,18:160,28:224")
    epoch, pixels = (int(text) for text in match.groups())
    if pixels < _MIN_PIXELS:
        raise ValueError(f"{entry!r}: an image needs at least {_MIN_PIXELS} pixels")
    if pixels > MAX_PIXELS:
        raise ValueError(f"{entry!r}: an image has at most {MAX_PIXELS} pixels")
    return epoch, pixels


def _check_ascending(epochs: Sequence[int]) -> None:
    for earlier, later in itertools.pairwise(epochs):
        if later <= earlier:
            raise ValueError(
                f"epoch {later} follows {earlier}. List the epochs in ascending order."
            )
