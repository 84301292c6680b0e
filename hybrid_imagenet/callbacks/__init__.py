"""The Keras callbacks of this package, for `model.fit`.

`hi.callbacks.default_callbacks()` returns those that every distributed run needs, in their order.
The training loop of the program calls the same classes, with further arguments.
"""

from hybrid_imagenet.callbacks.adabound_bounds import AdaBoundBounds
from hybrid_imagenet.callbacks.broadcast_initial_state import BroadcastInitialState
from hybrid_imagenet.callbacks.checkpoint import Checkpoint
from hybrid_imagenet.callbacks.compare_ranks import CompareRanks
from hybrid_imagenet.callbacks.default_callbacks import default_callbacks, on_rank_zero
from hybrid_imagenet.callbacks.divergence_guard import DivergenceGuard
from hybrid_imagenet.callbacks.lars_schedule import LARSSchedule
from hybrid_imagenet.callbacks.merge_batch_norm_statistics import MergeBatchNormStatistics
from hybrid_imagenet.callbacks.metric_average import MetricAverage
from hybrid_imagenet.callbacks.metrics_log import MetricsLog
from hybrid_imagenet.callbacks.profiler import Profiler
from hybrid_imagenet.callbacks.progress_on_rank_zero import ProgressOnRankZero
from hybrid_imagenet.callbacks.stall_watchdog import StallWatchdog
from hybrid_imagenet.callbacks.step_schedule import LearningRateSchedule
from hybrid_imagenet.callbacks.stop_at_target import StopAtTarget
from hybrid_imagenet.callbacks.swap_averaged_weights import SwapAveragedWeights
from hybrid_imagenet.callbacks.throughput import Throughput
from hybrid_imagenet.callbacks.tracker import Tracker
from hybrid_imagenet.callbacks.training_callback import TrainingCallback

__all__ = [
    "AdaBoundBounds",
    "BroadcastInitialState",
    "Checkpoint",
    "CompareRanks",
    "DivergenceGuard",
    "LARSSchedule",
    "LearningRateSchedule",
    "MergeBatchNormStatistics",
    "MetricAverage",
    "MetricsLog",
    "Profiler",
    "ProgressOnRankZero",
    "StallWatchdog",
    "StopAtTarget",
    "SwapAveragedWeights",
    "Throughput",
    "Tracker",
    "TrainingCallback",
    "default_callbacks",
    "on_rank_zero",
]
