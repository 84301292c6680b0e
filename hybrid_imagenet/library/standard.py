"""Lists the callbacks that a run with `model.fit` needs."""

from __future__ import annotations

import keras

from hybrid_imagenet.library.split_step import SplitCompiledStep
from hybrid_imagenet.training.callbacks.batch_norm import BatchNormSync
from hybrid_imagenet.training.callbacks.broadcast import BroadcastInitialState
from hybrid_imagenet.training.callbacks.first_rank import ProgressOnFirstRank, on_first_rank
from hybrid_imagenet.training.callbacks.metric_average import MetricAverage
from hybrid_imagenet.training.callbacks.schedules import HyperparameterSchedule


def standard(*first_rank: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """The callbacks of a run, in the order in which they must be called; all ranks give `fit` the same list.

    Statistics of batch normalization are merged and metrics averaged before anything else looks at them; rank 0's own
    callbacks come next, so that what they restore is broadcast; then the broadcast and the schedule.

    Args:
      first_rank: callbacks for rank 0 alone, as `keras.callbacks.ModelCheckpoint` and `BackupAndRestore`.
    """
    return [
        ProgressOnFirstRank(),
        SplitCompiledStep(),
        BatchNormSync(),
        MetricAverage(),
        *on_first_rank(*first_rank),
        BroadcastInitialState(),
        HyperparameterSchedule(),
    ]
