"""Lists the callbacks that a run with `model.fit` needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import keras

from hybrid_imagenet.callbacks import callback_state
from hybrid_imagenet.callbacks.adabound_bounds import AdaBoundBounds
from hybrid_imagenet.callbacks.broadcast_initial_state import BroadcastInitialState
from hybrid_imagenet.callbacks.checkpoint import Checkpoint
from hybrid_imagenet.callbacks.compare_ranks import CompareRanks
from hybrid_imagenet.callbacks.divergence_guard import DivergenceGuard
from hybrid_imagenet.callbacks.lars_schedule import LARSSchedule
from hybrid_imagenet.callbacks.merge_batch_norm_statistics import MergeBatchNormStatistics
from hybrid_imagenet.callbacks.metric_average import MetricAverage
from hybrid_imagenet.callbacks.progress_on_rank_zero import ProgressOnRankZero
from hybrid_imagenet.callbacks.schedule_log import ScheduleLog
from hybrid_imagenet.callbacks.stall_watchdog import STALL_SECONDS, StallWatchdog
from hybrid_imagenet.callbacks.step_schedule import LearningRateSchedule
from hybrid_imagenet.callbacks.stop_at_target import StopAtTarget
from hybrid_imagenet.callbacks.swap_averaged_weights import SwapAveragedWeights
from hybrid_imagenet.callbacks.throughput import Throughput
from hybrid_imagenet.callbacks.train_function import TrainFunction
from hybrid_imagenet.callbacks.training_callback import TrainingCallback, print_to_stderr
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import SharedError

_CHANGE_TRAINING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    StopAtTarget,
    SwapAveragedWeights,
)
_COMMUNICATE = (
    AdaBoundBounds,
    MergeBatchNormStatistics,
    BroadcastInitialState,
    Checkpoint,
    CompareRanks,
    DivergenceGuard,
    LARSSchedule,
    LearningRateSchedule,
    MetricAverage,
    StallWatchdog,
    Throughput,
)


def on_rank_zero(*callbacks: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Returns the callbacks on rank 0, and none on other ranks.

    It is meant for callbacks that write files, such as `ModelCheckpoint`. They must not
    communicate, nor change weights, learning rate or `stop_training`, because the other ranks would
    not notice.

    Example:
      callbacks = [
          *hi.callbacks.default_callbacks(),
          *hi.callbacks.on_rank_zero(keras.callbacks.CSVLogger("log.csv")),
      ]

    Args:
      *callbacks: Callbacks of Keras or of your own.

    Returns:
      The callbacks on rank 0, and an empty list on other ranks.

    Raises:
      UserError: For a callback of Keras or of this package that communicates or changes one of
        these; for `TensorBoard` if its package is not installed.
    """
    for callback in callbacks:
        _check(callback)
    if process.rank():
        return []
    if process.size() > 1:
        _warn_of_saving_within_an_epoch(callbacks)
    callback_state.add_callbacks_of_rank_zero(callbacks)
    return list(callbacks)


def default_callbacks(
    *first_rank: keras.callbacks.Callback, stall_timeout: float = STALL_SECONDS
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of a run, in the order in which they must be called.

    Every rank passes this list to `fit`. Statistics of batch normalization are merged and metrics
    averaged before other callbacks use them. The callbacks for rank 0 come next, so that what they
    restore is broadcast; then the broadcast, the schedules and the comparison of ranks. Callbacks
    that change training, such as `EarlyStopping`, are added on every rank, after this list.

    Example:
      model.fit(data, epochs=10, callbacks=hi.callbacks.default_callbacks())

    Args:
      *first_rank: Callbacks for rank 0 only, such as `keras.callbacks.ModelCheckpoint` and
        `BackupAndRestore`.
      stall_timeout: Seconds without progress of a rank after which the job stops with exit code 4;
        0 never ends it (default: 600.0).

    Returns:
      The callbacks, for `fit`: with several ranks `StallWatchdog`, then `ProgressOnRankZero`, one
      that prepares the training function, `MergeBatchNormStatistics`, `MetricAverage`, those for
      rank 0, `BroadcastInitialState`, `AdaBoundBounds`, `LARSSchedule`, `LearningRateSchedule`,
      `ScheduleLog` and `CompareRanks`.

    Raises:
      UserError: For a callback that must be on every rank, as in `on_rank_zero`.
    """
    return [
        *([StallWatchdog(stall_timeout)] if process.size() > 1 and stall_timeout else []),
        ProgressOnRankZero(),
        TrainFunction(),
        MergeBatchNormStatistics(),
        MetricAverage(),
        *on_rank_zero(*first_rank),
        BroadcastInitialState(),
        AdaBoundBounds(),
        LARSSchedule(),
        LearningRateSchedule(),
        ScheduleLog(),
        CompareRanks(),
    ]


def _check(callback: keras.callbacks.Callback) -> None:
    """Raises for a callback that every rank needs, or whose package is missing."""
    name = type(callback).__name__
    effect = _effect_on_all_ranks(callback)
    if effect:
        raise SharedError(
            f"{name} {effect}, and only rank 0 would have it: pass it to every rank, "
            f"callbacks=[*hybrid_imagenet.callbacks.default_callbacks(...), {name}(...)]"
        )
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        raise SharedError(
            "TerminateOnNaN stops one rank while the others wait for it: omit it, because all ranks"
            " skip a step with NaN"
        )
    if (
        isinstance(callback, keras.callbacks.TensorBoard)
        and importlib.util.find_spec("tensorboard") is None
    ):
        raise SharedError(
            "TensorBoard needs a package that is missing: pip install tensorboard, or use CSVLogger"
        )


def _warn_of_saving_within_an_epoch(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Warns of a file that would contain statistics and metrics of rank 0 alone."""
    for callback in callbacks:
        is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
        if is_checkpoint and callback.save_freq != "epoch":
            print_to_stderr(
                f"warning: ModelCheckpoint(save_freq={callback.save_freq}) saves within an epoch"
                " what rank 0 alone has: its metrics and its statistics of batch normalization. Use"
                ' save_freq="epoch" for a model to predict with, or'
                " hybrid_imagenet.callbacks.Checkpoint(folder, every_seconds=600) to continue from."
            )


def _effect_on_all_ranks(callback: keras.callbacks.Callback) -> str:
    """Returns what a callback does that every rank must do, or "" if rank 0 may have it alone."""
    if isinstance(callback, _CHANGE_TRAINING):
        return "changes training"
    if isinstance(callback, _COMMUNICATE):
        return "communicates"
    # A subclass that has its own `variables`.
    kind = type(callback)
    if isinstance(callback, TrainingCallback) and kind.variables is not TrainingCallback.variables:
        return "saves variables"
    return ""
