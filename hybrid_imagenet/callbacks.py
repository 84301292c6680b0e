"""The Keras callbacks of this package, for `model.fit`."""

from hybrid_imagenet.library.broadcast import BroadcastInitialState
from hybrid_imagenet.library.checkpoint import Checkpoint
from hybrid_imagenet.library.default_callbacks import (
    CompareRanks,
    MergeBatchNormStatistics,
    ProgressOnRankZero,
    StallWatchdog,
    default_callbacks,
    on_rank_zero,
)
from hybrid_imagenet.library.metric_average import MetricAverage

__all__ = [
    "BroadcastInitialState",
    "Checkpoint",
    "CompareRanks",
    "MergeBatchNormStatistics",
    "MetricAverage",
    "ProgressOnRankZero",
    "StallWatchdog",
    "default_callbacks",
    "on_rank_zero",
]
