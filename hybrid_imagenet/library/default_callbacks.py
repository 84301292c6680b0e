"""Lists the callbacks that a run with `model.fit` needs, and keeps to rank 0 what one rank is to
show and write.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hybrid_imagenet import comm, private_api
from hybrid_imagenet.comm import process
from hybrid_imagenet.comm.agreement import check_agreement, digest
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.library.broadcast import BroadcastInitialState
from hybrid_imagenet.library.checkpoint import Checkpoint
from hybrid_imagenet.library.metric_average import SAME_DATA, MetricAverage
from hybrid_imagenet.library.schedule import HyperparameterSchedule
from hybrid_imagenet.library.train_function import TrainFunction
from hybrid_imagenet.models import normalization
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.resilience.exit_code import exit_stalled
from hybrid_imagenet.resilience.stacks import FrameWatch
from hybrid_imagenet.resilience.watchdog import Watchdog
from hybrid_imagenet.training.batch_norm import BatchNormStatistics

STALL_SECONDS = 600.0
_TURN = 8.0  # seconds in which a launcher ends the others
_MOST_SKIPPED = 50  # steps in a row, as --max_skipped_steps
_REMEDY = (
    "give callbacks that change weights, learning rate or stop_training to every rank, behind"
    " hybrid_imagenet.callbacks.default_callbacks(...), whose arguments and on_rank_zero are for"
    " those that write files"
)


class ProgressOnRankZero(keras.callbacks.Callback):
    """Shows Keras's progress on rank 0 only, whatever `verbose` is on the others."""

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Silences the other ranks; Keras gives its own progress bar the same parameters after
        this.
        """
        super().set_params(params)
        if params and process.rank() != 0:
            params["verbose"] = 0


class MergeBatchNormStatistics(keras.callbacks.Callback):
    """Merges statistics of batch normalization before validation and at the end of epochs
    (`training.batch_norm`).

    Partial sums of gradient accumulation at the end of an epoch become their mean over ranks. What
    later callbacks save on one rank is then right for all.
    """

    def __init__(self) -> None:
        """It finds the layers by itself: a model without `call` may make them in its first step."""
        super().__init__()
        self._merged = False
        self._known: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._merged = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Merges the statistics before validation.

        Raises:
          UserError: on all ranks, if some of them have no validation here.
        """
        self._agree("validation")
        self._merge()

    def _agree(self, next_: str) -> None:
        remedy = "give validation_data and validation_freq to every rank"
        check_agreement(
            process.communicator(), {"what comes next": next_}, "after the steps", remedy
        )

    def _merge(self) -> None:
        ranks, found = process.communicator(), normalization.trainable_statistics(self.model)
        known = [id(variable) for pair in found for variable in pair]
        if known != self._known:
            self._known, self._statistics = known, BatchNormStatistics(ranks, found)
        if known:
            self._statistics.synchronize()
        self._merged = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Merges them if no validation has, and the sums.

        Raises:
          UserError: on all ranks, as `on_test_begin`.
        """
        self._agree("the end of the epoch")
        if not self._merged:
            self._merge()
        for optimizer in compiled_model.distributed(self.model).values():
            optimizer.average_sums(process.communicator())


class CompareRanks(keras.callbacks.Callback):
    """Ends training on all ranks when a callback or a step has changed some of them only.

    It compares at the start of each epoch and at the end of training, after all other callbacks. A
    rank that stops alone is found here, and not in a step, in which the other ranks would wait for
    it.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes how many updates were made.

        Raises:
          UserError: on all ranks, if they would train for themselves, or write the same files.
        """
        optimizer = self.model.optimizer
        alone = type(optimizer).__module__.startswith("keras.") or isinstance(
            optimizer, GroupedOptimizer
        )
        if alone and compiled_model.trains_as_keras(self.model) and process.communicator().size > 1:
            raise SharedError(
                "the optimizer sums no gradients over ranks: compile with"
                " hybrid_imagenet.DistributedOptimizer(...)"
            )
        _refuse_two_writers(private_api.running_callbacks())
        self._updates = {
            name: int(o.iterations) for name, o in compiled_model.distributed(self.model).items()
        }

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps this rank's loss of training, before `fit` resets the metrics for validation."""
        self._loss = self._own_loss()

    def _own_loss(self) -> float | None:
        tracker = private_api.loss_tracker(self.model)
        return None if tracker is None or not float(tracker.count) else float(tracker.result())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares; every rank calls it.

        Raises:
          UserError: on all ranks, with the ranks that differ and what differs.
        """
        self._loss = None
        self._compare(f"epoch {epoch + 1} begins")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Compares.

        Raises:
          UserError: on all ranks, with what differs, or if all steps were skipped.
        """
        self._compare("training ends")
        for name, optimizer in compiled_model.distributed(self.model).items():
            if (
                int(optimizer.loss_scale.skipped_in_a_row)
                and int(optimizer.iterations) == self._updates[name]
            ):
                raise self._skipped(name, optimizer, "all steps")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training that stands still.

        Raises:
          UserError: on all ranks, if the last `_MOST_SKIPPED` steps were skipped.
        """
        for name, optimizer in compiled_model.distributed(self.model).items():
            if optimizer.loss_scale.skipped_in_a_row >= _MOST_SKIPPED:
                raise self._skipped(name, optimizer, f"the last {_MOST_SKIPPED} steps or more")

    def _skipped(self, name: str, optimizer: DistributedOptimizer, steps: str) -> SharedError:
        """Returns the error for steps that were skipped, with the likeliest cause first; every rank
        calls it.
        """
        own = self._own_loss() if self._loss is None else self._loss
        losses = process.communicator().allgather_object(own)
        # With NaN, which equals nothing, one cannot tell.
        same_data = len(losses) > 1 and own is not None and all(loss == own for loss in losses)
        remedies = ["look for NaN in the data", "scale large targets"]
        if not optimizer.loss_scale.dynamic and optimizer.loss_scale.initial > 1:
            remedies.append('set loss_scale="dynamic"')
        if optimizer.settings.compression != "none":
            remedies.append('set compression="none"')
        return SharedError(
            (f"{SAME_DATA}. " if same_data else "")
            + f"{name}: {steps} were skipped, because their gradients are not finite:"
            f" {', or '.join(remedies)}"
        )

    def _compare(self, next_: str) -> None:
        ranks = process.communicator()
        if ranks.size == 1:
            return
        own = {
            "what comes next": next_,
            "weights": digest(self.model.trainable_variables),
            **{
                f"{name}.learning_rate": np.float32(
                    optimizer.learning_rate
                )  # as precise as the step sees it
                for name, optimizer in compiled_model.optimizers(self.model).items()
                if hasattr(optimizer, "learning_rate")  # MultiOptimizer has none
            },
        }
        check_agreement(ranks, own, "after an epoch", _REMEDY)


@contextlib.contextmanager
def _all_begin_within(seconds: float) -> Iterator[None]:
    """Ends this process with EXIT_STALLED and one line if the block takes longer: it waits for
    ranks to begin `fit`.

    Rank 0 says so first; its launcher ends the others before thousands of them say the same. 0
    watches nothing.
    """
    line = (
        f"error: not all ranks have begun fit within {seconds:g} s (stall_timeout={seconds:g}): the"
        " job ends"
    )
    after = min(seconds + _TURN * min(process.rank(), 2), threading.TIMEOUT_MAX)
    timer = threading.Timer(after, exit_stalled, (line,))
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class StallWatchdog(keras.callbacks.Callback):
    """Runs a watchdog during `model.fit`: ranks that hang are named, and end the job
    (`resilience.watchdog`).

    It ends with `fit`, also where an exception ends `fit` on this rank.
    """

    def __init__(self, stall_timeout: float = STALL_SECONDS):
        """Ends all ranks with exit code 4 when one makes no progress for `stall_timeout` seconds.

        Before the first step, which compiles, only a rank counts that has not begun `fit`, or sends
        no heartbeat.
        """
        super().__init__()
        self._stall_seconds = stall_timeout
        self._watchdog: Watchdog | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.on_train_end()
        self._before = self._done = 0
        with _all_begin_within(self._stall_seconds):
            self._watchdog = Watchdog(
                process.communicator(),
                self._stall_seconds,
                waiting_modules=(comm, *private_api.blocking_modules()),
                is_running=FrameWatch("fit").is_running,
                option="stall_timeout",
                remedy="",
            )
        self._watchdog.start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts on: Keras numbers the steps of each epoch from 0."""
        self._before += self._done
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._done = batch + 1
        self._tell(self._before + self._done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._tell(None)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._tell(None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _tell(self, step: int | None) -> None:
        if self._watchdog is not None:
            self._watchdog.record_progress(step)


_CHANGE_TRAINING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
_COMMUNICATE = (
    MergeBatchNormStatistics,
    BroadcastInitialState,
    Checkpoint,
    CompareRanks,
    HyperparameterSchedule,
    MetricAverage,
    StallWatchdog,
)


_WRITE = {
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
"""Where callbacks of Keras write."""


def _refuse_two_writers(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    own = {
        f"{type(callback).__name__}({getattr(callback, attribute)!r})"
        for callback in callbacks
        for kind, attribute in _WRITE.items()
        if isinstance(callback, kind)
    }
    each = process.communicator().allgather_object(sorted(own))
    several = collections.Counter(writer for writers in each for writer in writers)
    for writer, count in several.items():
        if count > 1:
            raise SharedError(
                f"{writer} on {count} ranks would write the same files: give it to "
                "hybrid_imagenet.callbacks.default_callbacks(...), for rank 0 alone"
            )


def on_rank_zero(*callbacks: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Returns the callbacks on rank 0 and none on others: for those that write files, as
    `ModelCheckpoint`.

    They must not communicate, nor change weights, learning rate or `stop_training`, which the other
    ranks would not notice.

    Raises:
      UserError: for a callback of Keras or of this package that does, and for `TensorBoard` where
        it cannot write.
    """
    for callback in callbacks:
        _check(callback)
    return list(callbacks) if process.rank() == 0 else []


def default_callbacks(
    *first_rank: keras.callbacks.Callback, stall_timeout: float = STALL_SECONDS
) -> list[keras.callbacks.Callback]:
    """The callbacks of a run, in the order in which they must be called; all ranks give `fit` the
    same list.

    Statistics of batch normalization are merged and metrics averaged before anything else looks at
    them; rank 0's own callbacks come next, so that what they restore is broadcast; then the
    broadcast, the schedule and the comparison of ranks. Callbacks that change training, as
    `EarlyStopping`, belong to every rank, behind this list.

    Args:
      first_rank: callbacks for rank 0 alone, as `keras.callbacks.ModelCheckpoint` and
      `BackupAndRestore`.
      stall_timeout: ends the job, with exit code 4, when a rank makes no progress for this long; 0
        never does.

    Raises:
      UserError: as `on_rank_zero`.
    """
    return [
        *([StallWatchdog(stall_timeout)] if process.size() > 1 and stall_timeout else []),
        ProgressOnRankZero(),
        TrainFunction(),
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
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        raise SharedError(
            "TerminateOnNaN stops one rank while others wait: omit it, all ranks skip such steps"
        )
    if (
        isinstance(callback, keras.callbacks.TensorBoard)
        and importlib.util.find_spec("tensorboard") is None
    ):
        raise SharedError(
            "TensorBoard needs a package that is missing: pip install tensorboard, or use CSVLogger"
        )
