"""Hyperparameters of LARS by batch: MLPerf's reference convergence points for ResNet-50 on
ImageNet.

The ten points are taken from `rcps_resnet.json`, 4.0.0 (github.com/mlcommons/logging): LARS with a
trust coefficient of 0.001, a linear warmup from 0, then polynomial decay of power 2 to 0. The
training recipe, the judgment of a run's convergence and the tuned relative step all read them here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

from hybrid_imagenet.schedules.relative_step import relative_step

TRAIN_IMAGES = 1_281_167
"""Images in ImageNet's training set (ILSVRC 2012)."""
CLASSES = 1000
"""Classes of ImageNet (ILSVRC 2012)."""
TARGET = 0.759
"""Top-1 accuracy, a fraction, to which `Point.epochs` is counted."""
ETA = 0.001
"""Trust coefficient of LARS at every point."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Settings of LARS that reach `TARGET` at a batch.

    Attributes:
      batch: images per update over all GPUs.
      epochs: mean epochs to `TARGET`.
      lr: learning rate at the end of the warmup.
      warmup_epochs: length of the linear warmup.
      momentum: of the velocity.
      weight_decay: coupled L2 coefficient.
      schedule_epochs: epoch at which the learning rate reaches 0.
      normalized_images: images whose common statistics batch normalization uses in training
        (`model_bn_span`).
    """

    batch: int
    epochs: float
    lr: float
    warmup_epochs: float
    momentum: float
    weight_decay: float
    schedule_epochs: float
    normalized_images: int

    def evaluation_offset(self, every: float) -> float:
        """Epochs after which to count in steps of `every`, so that one falls on the first whole
        epoch from `epochs` on.

        MLPerf's rules for ResNet-50 ask for an evaluation in every 4 epochs, over every image, and
        leave 0 to 3 open.
        """
        return math.ceil(round(self.epochs, 6)) % every

    @property
    def relative_step(self) -> float:
        """lr * eta / (1 - momentum) at the peak of the learning rate."""
        return relative_step(self.lr, ETA, self.momentum)


def normalization_group(images: int, per_gpu_batch: int, groups: Iterable[int]) -> int:
    """The number of GPUs among `groups` whose images together are nearest to `images` in ratio; the
    smaller of two.
    """
    return min(groups, key=lambda gpus: (abs(math.log(gpus * per_gpu_batch / images)), gpus))


def _point(
    batch: int,
    epochs: float,
    lr: float,
    warmup: int,
    momentum: float,
    decay: float,
    steps: int,
    span: int,
    *,
    after: bool = False,
) -> Point:
    """A row of the table. `steps` of decay count from the start of training, or `after` the warmup.

    The file does not say from where. A schedule that counted from the start would end before the
    mean epoch to the target at three points: there it counts from the end of the warmup. So the
    target comes after 94 to 100 % of the schedule at all ten.
    """
    end = steps * batch / TRAIN_IMAGES + (warmup if after else 0)
    return Point(batch, epochs, lr, warmup, momentum, decay, end, span)


POINTS = (
    _point(1632, 35.0, 7.4, 2, 0.9, 5e-5, 27476, 204),
    _point(3264, 35.2, 10.5, 2, 0.9, 5e-5, 14523, 204),
    _point(4096, 40.0, 10.0, 5, 0.9, 2e-4, 13137, 64),
    _point(8192, 42.0, 17.0, 5, 0.9, 2e-4, 6095, 64, after=True),
    _point(13056, 45.4, 12.8, 9, 0.9, 2.5e-5, 4710, 204),
    _point(32768, 56.0, 21.2, 16, 0.94, 2.5e-5, 2267, 128),
    _point(49152, 68.0, 19.405, 24, 0.951807, 1e-4, 1846, 256),
    _point(58880, 79.9, 23.246, 29, 0.951807, 1e-4, 1785, 230),
    _point(65536, 84.5, 24.699, 31, 0.951807, 1e-4, 1133, 128, after=True),
    _point(67840, 85.9, 24.699, 31, 0.951807, 1e-4, 1133, 424, after=True),
)


def at(batch: int) -> Point:
    """The settings for any batch, in images per update.

    Between two points the relative step and all else but the learning rate are linear in the
    logarithm of the batch, and the learning rate follows from relative step and momentum. Outside,
    the nearest point holds.
    """
    if not covers(batch):
        return dataclasses.replace(
            POINTS[0] if batch < POINTS[0].batch else POINTS[-1], batch=batch
        )
    low, high = next(pair for pair in itertools.pairwise(POINTS) if batch <= pair[1].batch)
    for point in (low, high):
        if batch == point.batch:
            return point
    share = math.log(batch / low.batch) / math.log(high.batch / low.batch)

    def between(name: str) -> float:
        first, second = getattr(low, name), getattr(high, name)
        return float(first + share * (second - first))

    momentum = between("momentum")
    return Point(
        batch=batch,
        epochs=between("epochs"),
        lr=between("relative_step") * (1 - momentum) / ETA,
        warmup_epochs=between("warmup_epochs"),
        momentum=momentum,
        weight_decay=between("weight_decay"),
        schedule_epochs=between("schedule_epochs"),
        normalized_images=round(between("normalized_images")),
    )


def tuned_step(batch: float) -> float:
    """The relative step of tuned LARS at the peak of the learning rate, for any batch.

    Between two points as in `at`; outside it follows the square root of the batch from the nearest
    point.

    Raises:
      ValueError: for a batch that is not positive.
    """
    nearest = min(max(batch, POINTS[0].batch), POINTS[-1].batch)
    return at(round(batch)).relative_step * math.sqrt(batch / nearest)


def covers(batch: int) -> bool:
    """Whether a batch lies within the points."""
    return POINTS[0].batch <= batch <= POINTS[-1].batch
