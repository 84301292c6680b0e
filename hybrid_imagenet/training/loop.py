"""Runs the training loop: walks the examples, calls the compiled step, and has the trainer do what
is due then.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.startup import STARTUP_PROGRESS
from hybrid_imagenet.training.accumulators import ClassificationSums
from hybrid_imagenet.training.divergence import DivergedError
from hybrid_imagenet.training.step import Batch
from hybrid_imagenet.training.trainer import Trainer


class Control:
    """Carries this rank's requests to stop or save in a small vector that each step adds up over
    ranks.

    So all ranks follow a request of any rank at the same step.
    """

    def __init__(self, save_every_seconds: float | None = None):
        """Starts without requests; `save_every_seconds`, on one rank only, asks for checkpoints by
        time.
        """
        self._save_every_seconds = save_every_seconds
        self._last_save = time.monotonic()
        # One constant for each of the four words, so that a step issues no host-to-device copy of
        # its own.
        self._words = {
            bits: tf.constant(bits, tf.int32) for bits in itertools.product((0, 1), repeat=2)
        }

    def word(self) -> tf.Tensor:
        """Returns this rank's requests, int32 [2]: stop, save."""
        save = self._save_every_seconds is not None and (
            time.monotonic() - self._last_save >= self._save_every_seconds
        )
        if save:
            self._last_save = time.monotonic()
        return self._words[int(REQUESTS.stop), int(save)]


class Loop:
    """Runs epochs of training steps, with validation in between.

    Values are fetched from the device every --log_every_steps steps, at the end of an epoch, and
    where a validation or the end of the run lies within an epoch. On a GPU a step's record holds
    the values of two steps before (`LateCopies`). An epoch with a validation inside has several
    epoch records: each covers what was trained since the one before.
    """

    def __init__(self, trainer: Trainer):
        """Starts where the trainer's state stands, once it is restored; advances it in place."""
        parts, config = trainer.parts, trainer.parts.config
        self.state, self.step = parts.state, parts.step
        self._trainer, self._data, self._order = trainer, parts.data, parts.data.order
        self._control = Control(
            config.checkpoint_every_seconds if parts.communicator.rank == 0 else None
        )
        self._log_every = config.log_every_steps
        self._compiled = False

    def run(self) -> None:
        """Trains from the state's cursor to the end, to the target, or to a request to stop, and
        saves.

        Raises:
          DivergedError: on all ranks; a record of the run says so.
          UserError: for what training cannot survive.
        """
        STARTUP_PROGRESS.begin("compiling the step")
        try:
            batches = self._data.stream(self.state.cursor, self.state.step)
            self._meter = _Meter(self.state)
            self._meter.restart(self.step.sums.read())
            while not (self._reached() and self._closed()) and not self.state.stop:
                self._epoch(self.state.finished_epochs, batches)
            self._trainer.loop_ends()
        except DivergedError as error:
            self._trainer.diverged(error)
            raise

    def _epoch(self, epoch: int, batches: Iterator[Batch]) -> None:
        _, micro_batches = self._data.sizes(epoch)
        global_batch = self._data.global_batch(epoch)
        if micro_batches > 1:
            self.step.prepare_accumulation()
        while self.state.cursor.epoch == epoch and not self._reached() and not self.state.stop:
            start = self.state.cursor
            if self._trainer.validates(self._order.position(start)):  # is due within the epoch
                self._close(epoch, global_batch)
                continue
            end = self._order.advance(start, global_batch)
            position = self._order.position(end)
            self._trainer.step_begins(self._order.position(start), position, global_batch)
            with tf.profiler.experimental.Trace("train", step_num=self.state.step + 1, _r=1):
                self._one_step(batches, micro_batches)
            self.state.cursor = end
            self.state.step += 1
            self.state.images += global_batch
            self._after_step(epoch, global_batch, position)
        if not self.state.stop:
            self._close(epoch, global_batch)

    def _reached(self) -> bool:
        return self._data.length.is_over(self.state.cursor, self.state.step)

    def _closed(self) -> bool:
        """Returns whether the epoch record at the end is made; a checkpoint may lie between a step
        and its record.
        """
        return self.state.recorded_at >= min(
            self._order.position(self.state.cursor), self._data.length.epochs
        )

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
        with tf.profiler.experimental.Trace("next_batch"):
            batch = next(batches)
        self._meter.waited += time.perf_counter() - began
        return batch

    def _after_step(self, epoch: int, global_batch: int, position: float) -> None:
        copies, record = self.step.copies, None
        copies.make(self.state.step, self._log_every)
        if self.state.step % self._log_every == 0:
            copies.open(self.state.step)
            sums = ClassificationSums(*copies.read("sums").tolist())
            if not self._compiled:
                self._meter.compiled()
            record = {"epoch": epoch + 1, "global_batch": global_batch, "position": position}
            record |= self._meter.record(sums)
        elif not self._compiled:
            self._meter.compiled()
        if not self._compiled:
            STARTUP_PROGRESS.finish()
        self._compiled = True
        stop, save = self.step.requests() > 0
        if stop:
            self.state.stop = "preempted"
        self._trainer.step_ends(position, record, bool(save))
        copies.close()

    def _close(self, epoch: int, global_batch: int) -> None:
        """Makes an epoch record: of a whole epoch, or inside of one."""
        position, whole = self._order.position(self.state.cursor), self.state.cursor.epoch > epoch
        record: dict[str, Any] = {
            "global_batch": global_batch,
            "epoch": epoch + 1 if whole else position,
        }
        record |= {"step": self.state.step, **self._meter.epoch(self.step.sums.read())}
        self.step.copies.forget()
        if self._trainer.validates(position):
            began = time.perf_counter()
            record |= self._trainer.validate()
            record["validation_seconds"] = time.perf_counter() - began
        # before what is saved at the end of the epoch: that is where the next one begins
        self.step.sums.reset()
        self._meter.lap()
        self.state.finished_epochs, self.state.recorded_at = self.state.cursor.epoch, position
        record["seconds"] = self.state.seconds
        self._trainer.epoch_ends(epoch, record)
        self._meter.restart(self.step.sums.read())


class _Meter:
    """Computes rates and averages between fetches; keeps `state.seconds` current."""

    def __init__(self, state: RunState):
        self.waited = 0.0
        self._state = state
        self._time = time.perf_counter()
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
        """Restarts the throughput of the next record after the first step, whose call contained its
        compilation.
        """
        self.lap()
        self._start_seconds = time.perf_counter() - self._epoch_time
        self._epoch_waited += self.waited
        self._begin_rates()

    def _begin_rates(self) -> None:
        self._since, self._images, self._step = self._time, self._state.images, self._state.step
        self.waited = 0.0

    def record(self, sums: ClassificationSums) -> dict[str, Any]:
        """Returns the values since the last fetch; the fetch that gave `sums` has waited for the
        device.
        """
        self.lap()
        steps = self._state.step - self._step
        values: dict[str, Any] = {
            "step": self._state.step,
            "seconds": self._state.seconds,
            **(sums - self._sums).means("train"),
        }
        # Without a step since the compiled one, whose time includes compilation, there is no speed
        # to record.
        if steps:
            elapsed = max(self._time - self._since, 1e-9)
            values["images_per_second"] = (self._state.images - self._images) / elapsed
            values["step_seconds"] = elapsed / steps
            values["data_wait_fraction"] = self.waited / elapsed
        self._epoch_waited += self.waited
        self._sums = sums
        self._begin_rates()
        return values

    def epoch(self, sums: ClassificationSums) -> dict[str, Any]:
        """Returns the values of the epoch; rates cover this session's part of it, without
        validation.
        """
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

    def lap(self) -> None:
        """Adds the seconds since the last lap to `state.seconds`; not zero."""
        now = time.perf_counter()
        self._state.seconds += max(now - self._time, 1e-9)
        self._time = now
