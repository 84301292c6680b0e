"""The Keras callbacks of this package, for `model.fit`."""

from hybrid_imagenet.library.batch_norm import MergeBatchNormStatistics
from hybrid_imagenet.library.broadcast import BroadcastInitialState
from hybrid_imagenet.library.checkpoint import Checkpoint
from hybrid_imagenet.library.compare_ranks import CompareRanks
from hybrid_imagenet.library.default_callbacks import ProgressOnRankZero, default_callbacks, on_rank_zero
from hybrid_imagenet.library.metric_average import MetricAverage
from hybrid_imagenet.library.stall_watchdog import StallWatchdog

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
