"""Reports ranks that hang, and ends the job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from hybrid_imagenet import comm, private_api
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import process
from hybrid_imagenet.resilience.exit_code import exit_stalled
from hybrid_imagenet.resilience.stacks import FrameWatch
from hybrid_imagenet.resilience.watchdog import Watchdog

STALL_SECONDS = 600.0
# A launcher ends the other ranks within this time after the first one has ended.
_LAUNCHER_SECONDS = 8.0


@contextlib.contextmanager
def _all_begin_within(seconds: float) -> Iterator[None]:
    """Ends this process with EXIT_STALLED and one line if the block takes longer.

    The block waits until all ranks have begun `fit`. Rank 0 prints its line first, and its launcher
    ends the others before thousands of them print the same. With 0 it never ends the process.
    """
    line = (
        f"error: not all ranks have begun fit within {seconds:g} s, so the job was stopped"
        f" (stall_timeout={seconds:g})."
    )
    after = min(seconds + _LAUNCHER_SECONDS * min(process.rank(), 2), threading.TIMEOUT_MAX)
    timer = threading.Timer(after, exit_stalled, (line,))
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class StallWatchdog(TrainingCallback):
    """Ends all ranks with exit code 4 if one of them makes no progress, and names that rank.

    It is one of `default_callbacks()` if there are several ranks. In `fit` it ends with `fit`, also
    if an exception ends `fit` on this rank. Before the first step, which compiles, a rank counts
    only if it has not begun `fit` or sends no heartbeat. `resilience.watchdog.Watchdog` does the
    work.

    If `stop_training` is set at a batch on some ranks only, the others would wait for them in the
    next step. Then the job stops with exit code 2 within seconds.

    Args:
      stall_timeout: Seconds without progress after which the job stops (default: 600.0).
      watchdog: A watchdog that runs already and is stopped by its owner (default: None, `fit`
        starts one).
    """

    def __init__(self, stall_timeout: float = STALL_SECONDS, *, watchdog: Watchdog | None = None):
        super().__init__()
        self._stall_seconds = stall_timeout
        self._watchdog = watchdog
        self._starts_watchdog = watchdog is None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self._starts_watchdog:
            return
        self.on_train_end()
        with _all_begin_within(self._stall_seconds):
            self._watchdog = Watchdog(
                self.communicator,
                self._stall_seconds,
                waiting_modules=(comm, *private_api.blocking_modules()),
                is_running=FrameWatch("fit").is_running,
                has_long_steps=self.model.steps_per_execution > 1,
                option="stall_timeout",
            )
        self._watchdog.start()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.record_begin(self.run.state.step + 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._record_progress(self.run.state.step)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._record_stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._record_stop()
        self._record_progress(None)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._record_progress(None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._starts_watchdog and self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _record_stop(self) -> None:
        """Records that `stop_training` has ended the steps of this rank.

        Other callbacks may set it at a batch. The next event after that comes before anything in
        which this rank would wait for the others.
        """
        # The program's model has no such attribute.
        if self._watchdog is not None and getattr(self.model, "stop_training", False):
            self._watchdog.record_stop()

    def _record_progress(self, step: int | None) -> None:
        if self._watchdog is not None:
            self._watchdog.record_progress(step)
