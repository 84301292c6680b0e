"""Measures throughput and means of training metrics between fetches."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.accumulators import ClassificationSums


class Mark(NamedTuple):
    """A position of the run from which rates are measured.

    Attributes:
      time: Seconds of `time.perf_counter`.
      images: Images that the run has trained on.
      step: Optimizer steps done.
    """

    time: float
    images: int
    step: int


class ThroughputMeter:
    """Computes rates and averages between fetches; keeps `state.seconds` current.

    Attributes:
      wait_seconds: Seconds for which training has waited for batches since the last fetch.
    """

    def __init__(self, state: RunState):
        now = time.perf_counter()
        self.wait_seconds = 0.0
        self._state = state
        # Time of the last call of `add_seconds`.
        self._last_time = now
        # Time from the beginning of the first epoch to the end of the first step.
        self._compile_seconds = 0.0
        # A resumed session begins inside the epoch.
        self._epoch_start = self._mark()
        # Waits of the epoch up to the last fetch.
        self._epoch_wait_seconds = 0.0
        self._last_fetch = self._mark()
        self._last_fetch_sums = ClassificationSums(0.0, 0.0, 0.0, 0.0)

    def start_epoch(self, sums: ClassificationSums) -> None:
        """Begins an epoch, or the rest of one.

        Args:
          sums: Sums of the part of the epoch that was trained earlier.
        """
        self.add_seconds()
        self._epoch_start = self._mark()
        self._epoch_wait_seconds = 0.0
        self._last_fetch_sums = sums
        self._restart_rates()

    def exclude_compilation(self) -> None:
        """Restarts the rates after the first step, whose call contained its compilation."""
        self.add_seconds()
        self._compile_seconds = time.perf_counter() - self._epoch_start.time
        self._epoch_wait_seconds += self.wait_seconds
        self._restart_rates()

    def _restart_rates(self) -> None:
        """Measures the next rates from the present position."""
        self._last_fetch = self._mark()
        self.wait_seconds = 0.0

    def _mark(self) -> Mark:
        """Returns the present position, at the time of the last call of `add_seconds`."""
        return Mark(self._last_time, self._state.images, self._state.step)

    def step_values(self, sums: ClassificationSums) -> dict[str, Any]:
        """Returns the values since the last fetch.

        Args:
          sums: Sums of this epoch so far; the fetch that gave them has waited for the device.
        """
        self.add_seconds()
        steps = self._state.step - self._last_fetch.step
        values: dict[str, Any] = {
            "step": self._state.step,
            "seconds": self._state.seconds,
            **(sums - self._last_fetch_sums).means("train"),
        }
        # Without a step since the compiled one, whose time includes compilation, there is no speed
        # to record.
        if steps:
            elapsed = max(self._last_time - self._last_fetch.time, 1e-9)
            num_images = self._state.images - self._last_fetch.images
            values["images_per_second"] = num_images / elapsed
            values["step_seconds"] = elapsed / steps
            values["data_wait_fraction"] = self.wait_seconds / elapsed
        self._epoch_wait_seconds += self.wait_seconds
        self._last_fetch_sums = sums
        self._restart_rates()
        return values

    def epoch_values(self) -> dict[str, Any]:
        """Returns the rates of the epoch; they cover this session's part, without validation."""
        self.add_seconds()
        elapsed = max(time.perf_counter() - self._epoch_start.time, 1e-9)
        values = {}
        if self._compile_seconds:
            values["train_start_seconds"] = self._compile_seconds
            self._compile_seconds = 0.0
        num_images = self._state.images - self._epoch_start.images
        values["images_per_second"] = num_images / elapsed
        values["train_seconds"] = elapsed
        values["data_wait_fraction"] = (self._epoch_wait_seconds + self.wait_seconds) / elapsed
        return values

    def add_seconds(self) -> None:
        """Adds the seconds since the last call to `state.seconds`, at least 1 ns."""
        now = time.perf_counter()
        self._state.seconds += max(now - self._last_time, 1e-9)
        self._last_time = now
