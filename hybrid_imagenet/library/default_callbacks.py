"""Lists the callbacks that a run with `model.fit` needs, and keeps to rank 0 what one rank is to show and write."""

from __future__ import annotations

import importlib.util
from typing import Any

import keras

from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.library.batch_norm import MergeBatchNormStatistics
from hybrid_imagenet.library.broadcast import BroadcastInitialState
from hybrid_imagenet.library.checkpoint import Checkpoint
from hybrid_imagenet.library.compare_ranks import CompareRanks
from hybrid_imagenet.library.metric_average import MetricAverage
from hybrid_imagenet.library.schedule import HyperparameterSchedule
from hybrid_imagenet.library.split_step import SplitCompiledStep
from hybrid_imagenet.library.stall_watchdog import STALL_SECONDS, StallWatchdog

_CHANGE_TRAINING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
_COMMUNICATE = (
    MergeBatchNormStatistics, BroadcastInitialState, Checkpoint, CompareRanks, HyperparameterSchedule, MetricAverage,
    StallWatchdog,
)  # fmt: skip


class ProgressOnRankZero(keras.callbacks.Callback):
    """Lets Keras show its progress on rank 0 alone, whatever `verbose` says on the others."""

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Silences the other ranks; Keras gives its own progress bar the same parameters after this."""
        super().set_params(params)
        if params and process.rank() != 0:
            params["verbose"] = 0


def on_rank_zero(*callbacks: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Returns the callbacks on rank 0 and none on others: for those that write files, as `ModelCheckpoint`.

    They must not communicate, nor change weights, learning rate or `stop_training`, which the other ranks would not
    notice.

    Raises:
      UserError: for a callback of Keras or of this package that does, and for `TensorBoard` where it cannot write.
    """
    for callback in callbacks:
        _check(callback)
    return list(callbacks) if process.rank() == 0 else []


def default_callbacks(
    *first_rank: keras.callbacks.Callback, stall_timeout: float = STALL_SECONDS
) -> list[keras.callbacks.Callback]:
    """The callbacks of a run, in the order in which they must be called; all ranks give `fit` the same list.

    Statistics of batch normalization are merged and metrics averaged before anything else looks at them; rank 0's own
    callbacks come next, so that what they restore is broadcast; then the broadcast, the schedule and the comparison of
    ranks. Callbacks that change training, as `EarlyStopping`, belong to every rank, behind this list.

    Args:
      first_rank: callbacks for rank 0 alone, as `keras.callbacks.ModelCheckpoint` and `BackupAndRestore`.
      stall_timeout: ends the job, with exit code 4, when a rank makes no progress for this long; 0 never does.

    Raises:
      UserError: as `on_rank_zero`.
    """
    return [
        *([StallWatchdog(stall_timeout)] if process.size() > 1 and stall_timeout else []),
        ProgressOnRankZero(),
        SplitCompiledStep(),
        MergeBatchNormStatistics(),
        MetricAverage(),
        *on_rank_zero(*first_rank),
        BroadcastInitialState(),
        HyperparameterSchedule(),
        CompareRanks(),
    ]


def _check(callback: keras.callbacks.Callback) -> None:
    """Refuses a callback that rank 0 must not have alone, or that lacks what it needs."""
    name = type(callback).__name__
    if isinstance(callback, _CHANGE_TRAINING + _COMMUNICATE):
        what = "changes training" if isinstance(callback, _CHANGE_TRAINING) else "communicates"
        raise SharedError(
            f"{name} {what}, and only rank 0 would have it: give it to every rank, "
            f"callbacks=[*hybrid_imagenet.callbacks.default_callbacks(...), {name}(...)]"
        )
    if isinstance(callback, keras.callbacks.TensorBoard) and importlib.util.find_spec("tensorboard") is None:
        raise SharedError("TensorBoard needs a package that is missing: pip install tensorboard, or use CSVLogger")
