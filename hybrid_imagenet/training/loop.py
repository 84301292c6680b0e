"""Runs the training loop: walks the examples, calls the compiled step and drives Keras callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.numerics.run_length import RunLength
from hybrid_imagenet.numerics.sampling import Cursor
from hybrid_imagenet.resilience.preemption import Control
from hybrid_imagenet.runlog import profile
from hybrid_imagenet.stages import START
from hybrid_imagenet.training.accumulators import ClassificationSums
from hybrid_imagenet.training.step import Batch, TrainStep

BatchPlan = Callable[[int], tuple[int, int]]


class Loop:
    """Runs epochs of training steps, with validation in between.

    Nothing is fetched from the device but every `log_every` steps, at the end of an epoch, and where a validation or
    the end of the run lies inside of an epoch. Every `log_every` steps a GPU gives what it had two steps before
    (`late_copies`). An epoch with a validation inside has several epoch records: each covers what was trained since the
    one before.
    """

    def __init__(
        self,
        *,
        state: RunState,
        step: TrainStep,
        length: RunLength,
        batches: BatchPlan,
        data: Callable[[Cursor, int], Iterator[Batch]],
        validate: Callable[[], dict[str, float]],
        validate_after: Callable[[float], bool],
        control: Control,
        world_size: int,
        log_every: int,
        callbacks: Sequence[keras.callbacks.Callback],
    ):
        """Takes the assembled parts.

        Args:
          state: where to start; advanced in place.
          step: the compiled step.
          length: where the run ends, in the order of examples.
          batches: for an epoch, images per rank and micro-batch, and micro-batches per step.
          data: micro-batches of this rank from a cursor on, before which so many steps lie.
          validate: validates over all ranks; returns `val_loss`, `val_top1`, `val_top5`.
          validate_after: whether to validate where so many fractional epochs are done.
          control: requests to stop or save.
          world_size: N.
          log_every: steps between fetches.
          callbacks: in the order in which they are called.
        """
        self.state = state
        self.step = step
        self._length = length
        self._order = length.order
        self._batches = batches
        self._data = data
        self._validate = validate
        self._validate_after = validate_after
        self._control = control
        self._world_size = world_size
        self._log_every = log_every
        self._callbacks = list(callbacks)
        self._meter = _Meter(state, log_every)
        self._compiled = False

    def run(self) -> None:
        """Trains from the state's cursor to the end, to the target, or to a request to stop."""
        self._call("on_train_begin")
        batches = self._data(self.state.cursor, self.state.step)
        self._meter.restart(self.step.sums.read())
        while not (self._reached() and self._closed()) and not self.state.stop:
            self._epoch(self.state.finished_epochs, batches)
        self._call("on_train_end", {"stop": self.state.stop})

    def _epoch(self, epoch: int, batches: Iterator[Batch]) -> None:
        per_rank, micro_batches = self._batches(epoch)
        global_batch = per_rank * micro_batches * self._world_size
        if micro_batches > 1:
            self.step.prepare_accumulation()
        self._call("on_epoch_begin", epoch, {"global_batch": global_batch})
        while self.state.cursor.epoch == epoch and not self._reached() and not self.state.stop:
            start = self.state.cursor
            if self._validate_after(self._order.position(start)):  # inside of an epoch
                self._close(epoch)
                continue
            end = self._order.advance(start, global_batch)
            span = {"start": self._order.position(start), "end": self._order.position(end)}
            self._call("on_train_batch_begin", self.state.step, span)
            self._one_step(batches, micro_batches)
            self.state.cursor = end
            self.state.step += 1
            self.state.images += global_batch
            self._after_step(span["end"])
        if not self.state.stop:
            self._close(epoch)

    def _reached(self) -> bool:
        return self._length.reached(self.state.cursor, self.state.step)

    def _closed(self) -> bool:
        """Returns whether the epoch record at the end is made; a checkpoint may lie between a step and its record."""
        return self.state.closed_at >= min(self._order.position(self.state.cursor), self._length.epochs)

    def _one_step(self, batches: Iterator[Batch], micro_batches: int) -> None:
        control = self._control.word()
        for _ in range(micro_batches - 1):
            self.step.accumulate(self._next(batches))
        if micro_batches == 1:
            self.step.single(self._next(batches), control)
        else:
            self.step.last(self._next(batches), control, tf.constant(float(micro_batches)))

    def _next(self, batches: Iterator[Batch]) -> Batch:
        began = time.perf_counter()
        with tf.profiler.experimental.Trace(profile.WAIT):
            batch = next(batches)
        self._meter.waited += time.perf_counter() - began
        return batch

    def _after_step(self, position: float) -> None:
        logs: dict[str, Any] = {"position": position}
        copies = self.step.copies
        copies.make(self.state.step, self._log_every)
        if self._meter.due():
            copies.open(self.state.step)
            logs |= self._meter.record(ClassificationSums(*copies.read("sums").tolist()))
        elif not self._compiled:
            self._meter.compiled()
        if not self._compiled:
            START.finish()
        self._compiled = True
        verdict = self._control.read(self.step.requests())
        logs["save"] = verdict.save
        if verdict.stop:
            self.state.stop = "preempted"
        self._call("on_train_batch_end", self.state.step, logs)
        copies.close()

    def _close(self, epoch: int) -> None:
        """Makes an epoch record: of a whole epoch, or inside of one."""
        position, whole = self._order.position(self.state.cursor), self.state.cursor.epoch > epoch
        logs: dict[str, Any] = {"epoch": epoch + 1 if whole else position, "step": self.state.step}
        logs |= self._meter.epoch(self.step.sums.read())
        self.step.copies.forget()
        self.step.sums.reset()  # before what is saved at the end of the epoch: that is where the next one begins
        if self._validate_after(position):
            began = time.perf_counter()
            self._call("on_test_begin")
            logs |= self._validate()
            self._call("on_test_end", logs)
            logs["validation_seconds"] = time.perf_counter() - began
        self._meter.lap()
        self.state.finished_epochs, self.state.closed_at = self.state.cursor.epoch, position
        logs["seconds"] = self.state.seconds
        self._call("on_epoch_end", epoch, logs)
        self._meter.restart(self.step.sums.read())

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*arguments)


class _Meter:
    """Computes rates and averages between fetches; keeps `state.seconds` current."""

    def __init__(self, state: RunState, log_every: int):
        self.waited = 0.0
        self._state = state
        self._log_every = log_every
        self._time: float | None = None
        self._start_seconds = 0.0

    def restart(self, sums: ClassificationSums) -> None:
        """Begins an epoch, or the rest of one; `sums` were added up in its earlier part."""
        self.lap()
        self._epoch_time = time.perf_counter()
        self._sums = sums
        self._epoch_images = self._state.images
        self._epoch_waited = self.waited = 0.0
        self._begin_rates()

    def compiled(self) -> None:
        """Begins the rates of the next record anew after the first step, whose call took as long as its compilation."""
        self.lap()
        self._start_seconds = time.perf_counter() - self._epoch_time
        self._epoch_waited += self.waited
        self._begin_rates()

    def _begin_rates(self) -> None:
        self._since, self._images, self._step = self._time, self._state.images, self._state.step
        self.waited = 0.0

    def due(self) -> bool:
        """Returns whether the metrics are to be fetched after this step."""
        return self._state.step % self._log_every == 0

    def record(self, sums: ClassificationSums) -> dict[str, Any]:
        """Returns the values since the last fetch; the fetch that gave `sums` has waited for the device."""
        self.lap()
        elapsed = max((self._time or 0.0) - (self._since or 0.0), 1e-9)
        steps = max(self._state.step - self._step, 1)
        values: dict[str, Any] = {
            "step": self._state.step,
            "seconds": self._state.seconds,
            "images_per_second": (self._state.images - self._images) / elapsed,
            "step_seconds": elapsed / steps,
            "data_wait_fraction": self.waited / elapsed,
            **(sums - self._sums).means("train"),
        }
        self._epoch_waited += self.waited
        self._sums = sums
        self._begin_rates()
        return values

    def epoch(self, sums: ClassificationSums) -> dict[str, Any]:
        """Returns the values of the epoch; rates cover this session's part of it, without validation."""
        self.lap()
        elapsed = max(time.perf_counter() - self._epoch_time, 1e-9)
        start, self._start_seconds = self._start_seconds, 0.0
        return {
            **({"train_start_seconds": start} if start else {}),
            "images_per_second": (self._state.images - self._epoch_images) / elapsed,
            "train_seconds": elapsed,
            "data_wait_fraction": (self._epoch_waited + self.waited) / elapsed,
            "sums": sums,
        }

    def lap(self) -> float:
        """Returns seconds since the last lap, which `state.seconds` gains; not zero."""
        now = time.perf_counter()
        elapsed = max(now - self._time, 1e-9) if self._time is not None else 1e-9
        self._time = now
        self._state.seconds += elapsed
        return elapsed
