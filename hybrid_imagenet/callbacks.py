"""The Keras callbacks of this package, for `model.fit`."""

from hybrid_imagenet.library.batch_norm import BatchNormSync
from hybrid_imagenet.library.broadcast import BroadcastInitialState
from hybrid_imagenet.library.checkpoint import Checkpoint
from hybrid_imagenet.library.compare_ranks import CompareRanks
from hybrid_imagenet.library.metric_average import MetricAverage
from hybrid_imagenet.library.schedule import HyperparameterSchedule
from hybrid_imagenet.library.split_step import SplitCompiledStep
from hybrid_imagenet.library.standard import ProgressOnFirstRank, on_first_rank, standard
from hybrid_imagenet.library.watch import WatchRanks

__all__ = [
    "BatchNormSync",
    "BroadcastInitialState",
    "Checkpoint",
    "CompareRanks",
    "HyperparameterSchedule",
    "MetricAverage",
    "ProgressOnFirstRank",
    "SplitCompiledStep",
    "WatchRanks",
    "on_first_rank",
    "standard",
]
