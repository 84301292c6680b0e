"""Trains a network with the loop of the program. Read it after `main.py`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.callbacks import callback_state
from hybrid_imagenet.callbacks.divergence_guard import DivergedError
from hybrid_imagenet.callbacks.training_callback import CallbackSequence
from hybrid_imagenet.cluster import out_of_memory
from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience.step_requests import NUM_REQUESTS, StepRequests
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.startup import STARTUP_PROGRESS
from hybrid_imagenet.training import accumulators, restoring
from hybrid_imagenet.training.accumulators import ClassificationSums
from hybrid_imagenet.training.components import RunComponents
from hybrid_imagenet.training.program_callbacks import program_callbacks
from hybrid_imagenet.training.program_checkpoints import ProgramCheckpoints
from hybrid_imagenet.training.program_run import ProgramRun
from hybrid_imagenet.training.step import Batch
from hybrid_imagenet.training.throughput_meter import ThroughputMeter


class Trainer:
    """Trains from the restored state to the end of the run, a target, or a request to stop.

    `train` is the loop. Everything around the steps happens in callbacks (`program_callbacks`).

    Attributes:
      components: Components of the run.
      state: Position of the run.
      data: Training batches of this rank.
      step: The compiled training step.
      save_callback: The callback that saves.
      requests: Requests of all ranks to stop or to save.
    """

    def __init__(
        self,
        components: RunComponents,
        more_callbacks: Callable[[Trainer], Sequence[keras.callbacks.Callback]] = lambda _: (),
    ):
        """Creates the callbacks of the run.

        Args:
          components: Components of the run.
          more_callbacks: Returns callbacks that are called after those of the program.
        """
        plan = components.plan
        self.components = components
        self.state = components.state
        self.data = components.data
        self.step = components.step
        self.save_callback = ProgramCheckpoints(components)
        reducer = components.optimizer.reducer
        if components.communicator.size > 1:
            reducer.request_sum = RequestSum(NUM_REQUESTS)
        self.requests = StepRequests(
            reducer.request_sum,
            plan.checkpoints.every_seconds if components.communicator.rank == 0 else None,
        )
        self._is_compiled = False
        self._run = ProgramRun(components)
        self._callbacks = CallbackSequence(
            [*program_callbacks(components, self.save_callback), *more_callbacks(self)],
            self._run,
            plan.epochs,
        )

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """All callbacks, in the order in which they are called."""
        return self._callbacks.callbacks

    def run(self) -> str:
        """Restores, trains and writes the summary; every rank calls it.

        Returns:
          Why the run ended: "" (all epochs), "target", "preempted" or the word of a callback.

        Raises:
          NumericsError: On all ranks, if training has diverged or only skips steps.
          UserError: On all ranks, if training cannot begin or continue.
        """
        recording = self.components.recording
        watchdog = self.components.watchdog
        try:
            restored_states = restoring.begin_or_resume(
                self.components, callback_state.saved_variables(self.callbacks)
            )
            self.save_callback.start(recording.store, self.callbacks, restored_states)
            try:
                self.train()
            except Exception as error:
                try:
                    self._record_failure(error)
                finally:
                    if isinstance(error, UserError):
                        recording.interrupt()
                raise
            watchdog.stop()
            recording.finish(self.state)
            return self.state.stop
        finally:
            REQUESTS.end()
            watchdog.stop()
            recording.stop_logging()

    def _record_failure(self, error: Exception) -> None:
        """Records the error that ended training.

        The loss of another rank is not recorded: the run was killed.
        """
        recording = self.components.recording
        if isinstance(error, DivergedError):
            recording.divergence(error.step, self.state.seconds, error.loss)
            return
        if lost_rank.is_lost_rank_error(error):
            return
        if out_of_memory.is_out_of_memory(error):
            advice = self.components.plan.recording.smaller_batch_advice
            error = out_of_memory.user_error(error, advice)
        elif not isinstance(error, UserError):
            # The message of a UserError is one line without secrets.
            error = UserError(f"{type(error).__name__}: {error}")
        recording.failure(self.state, str(error))

    def train(self) -> None:
        """Trains until the run is over, and calls the callbacks at all events.

        An epoch is split where a validation is due within it. If a run was restored from a
        checkpoint between the last step of an epoch and its record, the first pass of the outer
        loop trains no step.
        """
        STARTUP_PROGRESS.begin("compiling the step")
        state = self.state
        self._callbacks.on_train_begin()
        batches = iter(self.data.stream(state.cursor, state.step))
        self._meter = ThroughputMeter(state)
        while not self._is_over():
            epoch = state.finished_epochs
            batch = 0
            self._meter.start_epoch(self.step.sums.read())
            self._callbacks.on_epoch_begin(epoch)
            while self._is_inside(epoch):
                end = self._run.plan_step(epoch)
                self._callbacks.on_train_batch_begin(batch)
                # One of the callbacks has set them for this step.
                state.schedule_values = dict(self.components.optimizer.schedule_values)
                self._run_step(batches, epoch)
                state.cursor = end
                state.step += 1
                state.images += self._run.span.global_batch
                self._follow_requests()
                with self._logged_values():
                    logs = self._fetch_metrics(epoch)
                    self._callbacks.on_train_batch_end(batch, logs)
                batch += 1
            if not state.stop:
                logs = self._epoch_metrics(epoch)
                if self._validation_is_due():
                    logs |= self._validate()
                self._end_epoch(logs)
                self._callbacks.on_epoch_end(epoch, logs)
        self._callbacks.on_train_end()

    # Position of the run

    def _is_over(self) -> bool:
        """Returns whether nothing is left to train and to record."""
        last_position = min(self._run.position, self.data.length.epochs)
        is_recorded = self.state.recorded_at >= last_position
        return bool(self.state.stop) or (self._run.is_at_end() and is_recorded)

    def _is_inside(self, epoch: int) -> bool:
        """Returns whether the next step belongs to the same epoch and nothing is due before it."""
        return (
            self.state.cursor.epoch == epoch
            and not self._run.is_at_end()
            and not self.state.stop
            and not self._validation_is_due()
        )

    def _validation_is_due(self) -> bool:
        return self._run.is_at_end() or self.components.plan.validation.is_due(
            self.state.recorded_at, self._run.position
        )

    # A step

    def _run_step(self, batches: Iterator[Batch], epoch: int) -> None:
        """Runs one update on the device, from one or more micro-batches."""
        _, num_micro_batches = self.data.micro_batches(epoch)
        self.requests.post()
        step = self.step
        with tf.profiler.experimental.Trace("train", step_num=self.state.step + 1, _r=1):
            if num_micro_batches == 1:
                self._execute(step.update, self._next(batches))
                return
            step.prepare_accumulation()
            for _ in range(num_micro_batches - 1):
                self._execute(step.accumulate, self._next(batches))
            number = tf.constant(float(num_micro_batches))
            self._execute(step.update, self._next(batches), number)

    def _execute(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function of the step.

        Raises:
          UserError: If XLA compiles the step, and the first step fails.
        """
        try:
            function(*arguments)
        except tf.errors.OpError as error:
            has_other_cause = out_of_memory.is_out_of_memory(error) or (
                lost_rank.is_lost_rank_error(error)
            )
            if not self.step.jit_compile or self._is_compiled or has_other_cause:
                raise
            # The first line has the cause, and the others the places in the graph.
            reason = str(error.message).splitlines()[0]
            raise UserError(
                f"The first step, which XLA compiles, has failed: {reason}. Add --nojit_compile to"
                " train without XLA."
            ) from error

    def _next(self, batches: Iterator[Batch]) -> Batch:
        began = time.perf_counter()
        with tf.profiler.experimental.Trace("next_batch"):
            batch = next(batches)
        self._meter.wait_seconds += time.perf_counter() - began
        return batch

    def _is_logged(self) -> bool:
        """Returns whether the log gets values of the step that was issued last."""
        return self.state.step % self.components.plan.recording.log_every_steps == 0

    def _logged_values(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which the loop and callbacks read values of a step for the log.

        On a GPU values of the device are usually two steps old in it, so that the host does not
        wait for the device (`DelayedReadback`).
        """
        step = self.state.step
        telemetry = self.step.telemetry
        telemetry.copy_if_due(step, self.components.plan.recording.log_every_steps)
        return telemetry.reading_copy(step) if self._is_logged() else contextlib.nullcontext()

    def _fetch_metrics(self, epoch: int) -> dict[str, Any] | None:
        """Returns the values of the step if it is logged, else None."""
        if not self._is_compiled:
            # The context may have waited for the first step, whose time is not measured.
            self._meter.exclude_compilation()
            STARTUP_PROGRESS.finish()
            self._is_compiled = True
        if not self._is_logged():
            return None
        sums = ClassificationSums(*self.step.telemetry.read("sums").tolist())
        return {
            "epoch": epoch + 1,
            "global_batch": self._run.span.global_batch,
            "position": self._run.position,
            **self._meter.step_values(sums),
        }

    def _follow_requests(self) -> None:
        """Decides, the same on all ranks, whether to save or to end training after this step."""
        self.requests.follow()
        self._run.save_requested = self.requests.save
        if self.requests.stop:
            self._run.request_stop("preempted")

    # The end of an epoch, and validation

    def _epoch_metrics(self, epoch: int) -> dict[str, Any]:
        """Returns the values of an epoch, or of its part since the previous record."""
        position = self._run.position
        is_whole = self.state.cursor.epoch > epoch
        rates = self._meter.epoch_values()
        sums = self.step.sums.read()
        self.step.telemetry.discard_copy()
        allreduce_sum = self.components.communicator.allreduce_sum
        return {
            "global_batch": self.data.global_batch(epoch),
            "epoch": epoch + 1 if is_whole else position,
            "step": self.state.step,
            **rates,
            **accumulators.sum_over_ranks(sums, allreduce_sum).means("train"),
        }

    def _end_epoch(self, logs: dict[str, Any]) -> None:
        """Advances the state to the end of the epoch, before callbacks record and save it."""
        self.step.sums.reset()
        self._meter.add_seconds()
        self.state.finished_epochs = self.state.cursor.epoch
        self.state.recorded_at = self._run.position
        logs["seconds"] = self.state.seconds

    def _validate(self) -> dict[str, Any]:
        """Returns the results of one pass over the validation images, with the name of the split.

        Raises:
          UserError: On all ranks, for images that cannot be used, after the state was saved.
        """
        began = time.perf_counter()
        if not self._is_compiled:
            # A restored run may begin here. The watchdog must not take this for a start that hangs.
            STARTUP_PROGRESS.close()
        validation = self.components.validation
        self._callbacks.on_test_begin()
        try:
            values: dict[str, Any] = validation.run(self._callbacks.on_test_batch_end)
        except UserError:
            # This puts the trained weights back, so that they are the ones that are saved.
            self._callbacks.on_test_end(None)
            self.save_callback.finish()
            raise
        self._callbacks.on_test_end(values)
        self.components.recording.keep_image_results(validation)
        if validation.compile_seconds:
            values["validation_start_seconds"] = validation.compile_seconds
        return {
            "val_split": self.components.plan.validation.split,
            **values,
            "validation_seconds": time.perf_counter() - began,
        }
