"""The Keras callbacks of this package, for `model.fit`; the program trains with the same ones."""

from hybrid_imagenet.library.split_step import SplitCompiledStep
from hybrid_imagenet.library.standard import standard
from hybrid_imagenet.training.callbacks.batch_norm import BatchNormSync
from hybrid_imagenet.training.callbacks.broadcast import BroadcastInitialState
from hybrid_imagenet.training.callbacks.first_rank import ProgressOnFirstRank, on_first_rank
from hybrid_imagenet.training.callbacks.keras_checkpoint import Checkpoint
from hybrid_imagenet.training.callbacks.metric_average import MetricAverage
from hybrid_imagenet.training.callbacks.progress_notes import WatchRanks
from hybrid_imagenet.training.callbacks.schedules import HyperparameterSchedule

__all__ = [
    "BatchNormSync",
    "BroadcastInitialState",
    "Checkpoint",
    "HyperparameterSchedule",
    "MetricAverage",
    "ProgressOnFirstRank",
    "SplitCompiledStep",
    "WatchRanks",
    "on_first_rank",
    "standard",
]
