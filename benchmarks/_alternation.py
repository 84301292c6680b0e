"""Times the loop of a run and its bare step in turns, for `python -m benchmarks loop`."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import tensorflow as tf

from benchmarks.step_rate import processor
from benchmarks.turns import wait_for_turn
from hybrid_imagenet import train
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import build
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.step import EvaluationStep, FunctionPerShape
from hybrid_imagenet.training.trainer import Trainer

# Steps of the loop before the first round.
_WARMUP_STEPS = 3
# Seconds in which the pipeline fills its buffers before the bare steps.
_SETTLE_SECONDS = 0.5
_DISPATCH_CALLS = 50


class Finished(Exception):  # noqa: N818 - it ends the run and is not an error
    """Raised when everything has been measured."""


def measure(
    config: RunConfig, communicator: Communicator, steps: int, rounds: int
) -> dict[str, Any]:
    """Runs the loop of a configuration in alternation with its bare step.

    Returns:
      A JSON-ready object.

    Raises:
      UserError: For a configuration that cannot run, more than one rank, or a run that is stopped.
    """
    if communicator.size > 1:
        raise UserError(
            f"The benchmark loop measures one process, but {communicator.size} were started."
            " Start it without a launcher."
        )
    callbacks: list[Alternation] = []

    def create_callbacks(trainer: Trainer) -> list[Alternation]:
        callbacks.append(Alternation(trainer, steps, rounds))
        return callbacks

    try:
        outcome = train.run(config, communicator, create_callbacks)
    except Finished:
        return callbacks[0].report()
    reason = f" ({outcome})" if outcome else ""
    raise UserError(
        f"The run ended before {rounds} rounds of {steps} steps{reason}. Lower --steps or --rounds,"
        f" or raise --epochs={config.run.epochs:g} after --."
    )


class Alternation(TrainingCallback):
    """Measures the loop and the bare step in turns, after all other callbacks of a step.

    Attributes:
      components: Components of the run.
      loop_seconds: Seconds per step of the loop, by round.
      bare_seconds: Seconds per bare step, by round.
      host_seconds: Seconds per step that the loop spends outside the step's call and without
        waiting for data, by round.
      waited_seconds: Seconds per step that the loop waits for data, by round.
      other_results: What is measured once, as `report` returns it.
    """

    def __init__(self, trainer: Trainer, steps: int, rounds: int):
        """Replaces the compiled step of a run by one that is timed.

        Args:
          trainer: Trainer of the run.
          steps: Number of steps of a turn.
          rounds: Number of turns of each.
        """
        super().__init__()
        self._trainer = trainer
        self.components = trainer.components
        self.loop_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.waited_seconds: list[float] = []
        self.other_results: dict[str, Any] = {}
        self._steps = steps
        self._rounds = rounds
        step = self.components.step
        self._compiled = step.update
        self._seconds_in_calls = 0.0
        self._last_arguments: tuple[Any, ...] = ()
        step.update = cast(FunctionPerShape, self._call_and_time)
        self._measurement = self._measure()
        next(self._measurement)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Continues the measurement."""
        next(self._measurement)

    def _call_and_time(self, *arguments: Any) -> tf.Tensor:
        start = time.perf_counter()
        result = self._compiled(*arguments)
        self._seconds_in_calls += time.perf_counter() - start
        self._last_arguments = arguments
        return result

    def _measure(self) -> Iterator[None]:
        """Measures everything; each `yield` lets the loop make one step."""
        for _ in range(_WARMUP_STEPS):
            yield
        wait_for_turn()
        for _ in range(self._rounds):
            yield from self._measure_loop()
            self._measure_bare_step()
        self.other_results["dispatch_milliseconds"] = 1e3 * self._dispatch_seconds()
        yield from self._measure_checkpoint()
        self.other_results["validation"] = self._measure_validation()
        raise Finished

    def _measure_loop(self) -> Iterator[None]:
        # After one step, the pipeline works at the pace of the loop.
        yield
        self._wait()
        data = self.components.data
        waited_before = data.wait_seconds
        self._seconds_in_calls = 0.0
        start = time.perf_counter()
        for _ in range(self._steps):
            yield
        self._wait()
        elapsed = time.perf_counter() - start
        waited = data.wait_seconds - waited_before
        self.loop_seconds.append(elapsed / self._steps)
        self.waited_seconds.append(waited / self._steps)
        self.host_seconds.append((elapsed - waited - self._seconds_in_calls) / self._steps)

    def _wait(self) -> None:
        """Waits until the device has finished its work."""
        self.components.step.sums.read()

    def _measure_bare_step(self) -> None:
        time.sleep(_SETTLE_SECONDS)
        self._compiled(*self._last_arguments)
        self._wait()
        start = time.perf_counter()
        for _ in range(self._steps):
            self._compiled(*self._last_arguments)
        self._wait()
        self.bare_seconds.append((time.perf_counter() - start) / self._steps)

    def _dispatch_seconds(self) -> float:
        """Returns the seconds of a call with the inputs of the step that computes nothing."""
        captured = self._compiled.get_concrete_function(*self._last_arguments).captured_inputs

        def nothing(batch: Any, *more: tf.Tensor) -> tf.Tensor:
            for tensor in captured:
                tf.identity(tensor)
            return batch["label"]

        call = FunctionPerShape(nothing)
        call(*self._last_arguments)
        seconds = []
        for _ in range(_DISPATCH_CALLS):
            start = time.perf_counter()
            call(*self._last_arguments)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _measure_checkpoint(self) -> Iterator[None]:
        """Saves a checkpoint; the loop continues until the file is complete."""
        store = self.components.recording.store
        start = time.perf_counter()
        self._trainer.save_callback.save()
        blocked_seconds = time.perf_counter() - start
        steps = 0
        while store is not None and store.writing:
            yield
            steps += 1
        self.other_results["checkpoint"] = {
            "blocked_seconds": blocked_seconds,
            "seconds": time.perf_counter() - start,
            "steps_meanwhile": steps,
        }

    def _measure_validation(self) -> dict[str, float]:
        """Validates the validation images, which traces the step, then all training images."""
        parts = self.components
        plan = parts.plan
        step = EvaluationStep(parts.model, build.evaluation_preprocess(plan.compute_dtype))
        for source in (parts.sources[plan.validation.split], parts.data.source):
            validation = Validation(
                step,
                source,
                parts.communicator,
                batch=plan.validation.batch,
                image_size=plan.validation.image_size,
                crop_fraction=plan.validation.crop_fraction,
                options=parts.data.options,
            )
            start = time.perf_counter()
            validation.run()
            # The seconds of the training images remain.
            seconds = time.perf_counter() - start
        per_image = seconds / parts.data.source.num_examples
        training = statistics.median(self.loop_seconds) / plan.base_batch
        return {
            "images": parts.data.source.num_examples,
            "seconds_per_image": per_image,
            "share_of_training": per_image / training,
        }

    def report(self) -> dict[str, Any]:
        """Returns the measured figures as a JSON object."""
        plan = self.components.plan
        batch = plan.base_batch
        loop_seconds = statistics.median(self.loop_seconds)
        bare_seconds = statistics.median(self.bare_seconds)
        ratios = [
            bare / loop for loop, bare in zip(self.loop_seconds, self.bare_seconds, strict=True)
        ]
        return {
            "benchmark": "loop",
            "model": plan.network.model,
            "batch": batch,
            "image_size": plan.image_sizes.at(0),
            "precision": plan.precision,
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "images_per_second": batch / loop_seconds,
            "bare_images_per_second": batch / bare_seconds,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "host_milliseconds": 1e3 * statistics.median(self.host_seconds),
            "data_wait_fraction": statistics.median(self.waited_seconds) / loop_seconds,
            "traces": self._compiled.experimental_get_tracing_count(),
            **self.other_results,
            "machine": processor(),
            "date": datetime.date.today().isoformat(),
        }
