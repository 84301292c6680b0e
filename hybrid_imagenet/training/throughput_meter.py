"""Measures throughput and means of training metrics between fetches."""

from __future__ import annotations

import time
from typing import Any

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.accumulators import ClassificationSums


class ThroughputMeter:
    """Computes rates and averages between fetches; keeps `state.seconds` current.

    Attributes:
      wait_seconds: seconds for which training has waited for batches since the last record.
    """

    def __init__(self, state: RunState):
        self.wait_seconds = 0.0
        self._state = state
        self._time = time.perf_counter()
        self._compile_seconds = 0.0

    def start_epoch(self, sums: ClassificationSums) -> None:
        """Begins an epoch, or the rest of one.

        Args:
          sums: of the part of the epoch that was trained earlier.
        """
        self.add_seconds()
        self._epoch_start = self._time
        self._sums = sums
        self._epoch_images = self._state.images
        self._epoch_wait_seconds = 0.0
        self.wait_seconds = 0.0
        self._start_rates()

    def exclude_compilation(self) -> None:
        """Restarts the rates after the first step, whose call contained its compilation."""
        self.add_seconds()
        self._compile_seconds = time.perf_counter() - self._epoch_start
        self._epoch_wait_seconds += self.wait_seconds
        self._start_rates()

    def _start_rates(self) -> None:
        self._rate_start = self._time
        self._images = self._state.images
        self._step = self._state.step
        self.wait_seconds = 0.0

    def step_values(self, sums: ClassificationSums) -> dict[str, Any]:
        """Returns the values since the last fetch.

        Args:
          sums: of this epoch so far; the fetch that gave them has waited for the device.
        """
        self.add_seconds()
        steps = self._state.step - self._step
        values: dict[str, Any] = {
            "step": self._state.step,
            "seconds": self._state.seconds,
            **(sums - self._sums).means("train"),
        }
        # Without a step since the compiled one, whose time includes compilation, there is no speed
        # to record.
        if steps:
            elapsed = max(self._time - self._rate_start, 1e-9)
            values["images_per_second"] = (self._state.images - self._images) / elapsed
            values["step_seconds"] = elapsed / steps
            values["data_wait_fraction"] = self.wait_seconds / elapsed
        self._epoch_wait_seconds += self.wait_seconds
        self._sums = sums
        self._start_rates()
        return values

    def epoch_values(self) -> dict[str, Any]:
        """Returns the rates of the epoch; they cover this session's part, without validation."""
        self.add_seconds()
        elapsed = max(time.perf_counter() - self._epoch_start, 1e-9)
        values = {}
        if self._compile_seconds:
            values["train_start_seconds"] = self._compile_seconds
            self._compile_seconds = 0.0
        values["images_per_second"] = (self._state.images - self._epoch_images) / elapsed
        values["train_seconds"] = elapsed
        values["data_wait_fraction"] = (self._epoch_wait_seconds + self.wait_seconds) / elapsed
        return values

    def add_seconds(self) -> None:
        """Adds the seconds since the last call to `state.seconds`, at least 1 ns."""
        now = time.perf_counter()
        self._state.seconds += max(now - self._time, 1e-9)
        self._time = now
