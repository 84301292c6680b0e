"""Hyperparameters of LARS by batch: MLPerf's reference convergence points for ResNet-50.

The ten points are taken from `rcps_resnet.json`, 4.0.0 (github.com/mlcommons/logging). They are for
ImageNet and LARS with a trust coefficient of 0.001, a linear warmup from 0, then polynomial decay
of power 2 to 0. The training recipe, the judgment of a run's convergence and the tuned relative
step all use them.
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
TARGET_TOP1 = 0.759
"""Validation top-1, a fraction, to which `Point.epochs` is counted."""
ETA = 0.001
"""Trust coefficient of LARS at every point."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Holds settings of LARS that reach `TARGET_TOP1` at a batch.

    Attributes:
      batch: Images per update of all GPUs.
      epochs: Mean number of epochs to `TARGET_TOP1`.
      lr: Learning rate at the end of the warmup.
      warmup_epochs: Length of the linear warmup.
      momentum: Momentum of the velocity.
      weight_decay: Coefficient of coupled L2 decay.
      schedule_epochs: Epoch at which the learning rate reaches 0.
      normalized_images: Images over which batch normalization computes statistics in training
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
        """Returns the epoch after which to evaluate every `every` epochs.

        One evaluation is then after the first whole epoch from `epochs` on. MLPerf's rules for
        ResNet-50 require an evaluation over every image in every 4 epochs, and leave the offset (0
        to 3) open.
        """
        return math.ceil(round(self.epochs, 6)) % every

    @property
    def relative_step(self) -> float:
        """The relative step at the peak of the learning rate: lr * eta / (1 - momentum)."""
        return relative_step(self.lr, ETA, self.momentum)


def normalization_group(images: int, per_gpu_batch: int, groups: Iterable[int]) -> int:
    """Chooses the number of GPUs that normalize together.

    Args:
      images: The wanted number of images.
      per_gpu_batch: Images of one GPU.
      groups: Possible numbers of GPUs.

    Returns:
      The number whose images are nearest to `images` in ratio; the smaller of two equally near.
    """

    def distance(gpus: int) -> tuple[float, int]:
        return abs(math.log(gpus * per_gpu_batch / images)), gpus

    return min(groups, key=distance)


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
    after_warmup: bool = False,
) -> Point:
    """Returns a row of the table.

    `steps` of decay are counted from the start of training, or from the end of the warmup if
    `after_warmup`. The file does not say from where. At three points a schedule that counts from
    the start would end before the mean epoch to the target, so there it counts from the end of the
    warmup. The target is then reached after 94 to 100 % of the schedule at all ten points.
    """
    schedule_epochs = steps * batch / TRAIN_IMAGES + (warmup if after_warmup else 0)
    return Point(batch, epochs, lr, warmup, momentum, decay, schedule_epochs, span)


POINTS = (
    _point(1632, 35.0, 7.4, 2, 0.9, 5e-5, 27476, 204),
    _point(3264, 35.2, 10.5, 2, 0.9, 5e-5, 14523, 204),
    _point(4096, 40.0, 10.0, 5, 0.9, 2e-4, 13137, 64),
    _point(8192, 42.0, 17.0, 5, 0.9, 2e-4, 6095, 64, after_warmup=True),
    _point(13056, 45.4, 12.8, 9, 0.9, 2.5e-5, 4710, 204),
    _point(32768, 56.0, 21.2, 16, 0.94, 2.5e-5, 2267, 128),
    _point(49152, 68.0, 19.405, 24, 0.951807, 1e-4, 1846, 256),
    _point(58880, 79.9, 23.246, 29, 0.951807, 1e-4, 1785, 230),
    _point(65536, 84.5, 24.699, 31, 0.951807, 1e-4, 1133, 128, after_warmup=True),
    _point(67840, 85.9, 24.699, 31, 0.951807, 1e-4, 1133, 424, after_warmup=True),
)


def point_at(batch: int) -> Point:
    """Returns the settings for any batch.

    Between two points, the relative step and everything else except the learning rate are linear in
    the logarithm of the batch. The learning rate follows from relative step and momentum. Outside
    of the points, the settings are those of the nearest one.

    Args:
      batch: Images per update of all GPUs.
    """
    if not covers(batch):
        nearest = POINTS[0] if batch < POINTS[0].batch else POINTS[-1]
        return dataclasses.replace(nearest, batch=batch)
    low, high = next(pair for pair in itertools.pairwise(POINTS) if batch <= pair[1].batch)
    for point in (low, high):
        if batch == point.batch:
            return point
    fraction = math.log(batch / low.batch) / math.log(high.batch / low.batch)

    def interpolate(first: float, second: float) -> float:
        return float(first + fraction * (second - first))

    momentum = interpolate(low.momentum, high.momentum)
    step = interpolate(low.relative_step, high.relative_step)
    return Point(
        batch=batch,
        epochs=interpolate(low.epochs, high.epochs),
        lr=step * (1 - momentum) / ETA,
        warmup_epochs=interpolate(low.warmup_epochs, high.warmup_epochs),
        momentum=momentum,
        weight_decay=interpolate(low.weight_decay, high.weight_decay),
        schedule_epochs=interpolate(low.schedule_epochs, high.schedule_epochs),
        normalized_images=round(interpolate(low.normalized_images, high.normalized_images)),
    )


def tuned_step(batch: float) -> float:
    """Returns the peak relative step of tuned LARS for any batch.

    Between two points it is the relative step of `point_at`. Outside it follows the square root
    of the batch from the nearest point.

    Raises:
      ValueError: For a batch that is not positive.
    """
    nearest = min(max(batch, POINTS[0].batch), POINTS[-1].batch)
    return point_at(round(batch)).relative_step * math.sqrt(batch / nearest)


def covers(batch: int) -> bool:
    """Returns whether a batch is between the smallest and the largest point."""
    return POINTS[0].batch <= batch <= POINTS[-1].batch
