"""Times the loop of a run and its bare step in turns, for `hybrid-imagenet bench loop`."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import tensorflow as tf

from hybrid_imagenet import train
from hybrid_imagenet.benchmarks.scaling import wait_for_turn
from hybrid_imagenet.benchmarks.step_rate import processor
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import build
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.step import EvaluationStep, FunctionPerShape
from hybrid_imagenet.training.trainer import Trainer

_WARM_UP = 3  # steps of the loop before the first round
_SETTLE = 0.5  # seconds in which the pipeline fills its buffers before the bare steps


class Finished(Exception):  # noqa: N818 - it ends the run, it is no error
    """Raised when all has been measured."""


def measure(
    config: RunConfig, communicator: Communicator, steps: int, rounds: int
) -> dict[str, Any]:
    """Runs the loop of a configuration in alternation with its bare step.

    Returns:
      A JSON-ready object.

    Raises:
      UserError: for a configuration that cannot run, more than one rank, or a run that is stopped.
    """
    if communicator.size > 1:
        raise UserError("benchmarks loop measures one process: start it without a launcher")
    found: list[Alternation] = []

    def alternating(trainer: Trainer) -> list[Alternation]:
        found.append(Alternation(trainer, steps, rounds))
        return found

    try:
        outcome = train.run(config, communicator, alternating)
    except Finished:
        return found[0].report()
    reason = outcome or f"--epochs={config.run.epochs} are too few"
    raise UserError(
        f"benchmarks loop: the run ended before {rounds} rounds of {steps} steps ({reason})"
    )


class Alternation(TrainingCallback):
    """Counts the loop's steps and takes the turns, after all other callbacks of a step."""

    def __init__(self, trainer: Trainer, steps: int, rounds: int):
        """Wraps the compiled step to time it."""
        super().__init__()
        self._trainer = trainer
        self.components = parts = trainer.components
        self.loop_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.waited_seconds: list[float] = []
        self.more: dict[str, Any] = {}
        self._steps, self._rounds = steps, rounds
        self._compiled = parts.step.update_from_one_batch
        self._inside = 0.0
        self._last: tuple[Any, ...] = ()
        parts.step.update_from_one_batch = cast(FunctionPerShape, self._timed)
        self._plan = self._turns()
        next(self._plan)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Continues with the next step of the plan."""
        next(self._plan)

    def _timed(self, *arguments: Any) -> tf.Tensor:
        began = time.perf_counter()
        result = self._compiled(*arguments)
        self._inside += time.perf_counter() - began
        self._last = arguments
        return result

    def _turns(self) -> Iterator[None]:
        """The measurement; each `yield` lets the loop make one step."""
        for _ in range(_WARM_UP):
            yield
        wait_for_turn()
        for _ in range(self._rounds):
            yield  # the pipeline works at the loop's pace from here on
            self._wait()
            waited, self._inside = self.components.data.wait_seconds, 0.0
            began = time.perf_counter()
            for _ in range(self._steps):
                yield
            self._wait()
            elapsed = time.perf_counter() - began
            waited = self.components.data.wait_seconds - waited
            self.loop_seconds.append(elapsed / self._steps)
            self.waited_seconds.append(waited / self._steps)
            self.host_seconds.append((elapsed - waited - self._inside) / self._steps)
            self._bare()
        self.more["dispatch_milliseconds"] = 1e3 * self._dispatch()
        yield from self._checkpoint()
        self.more["validation"] = self._validation()
        raise Finished

    def _wait(self) -> None:
        """Waits until the device has finished; a processor has already."""
        self.components.step.sums.read()

    def _bare(self) -> None:
        time.sleep(_SETTLE)
        self._compiled(*self._last)
        self._wait()
        began = time.perf_counter()
        for _ in range(self._steps):
            self._compiled(*self._last)
        self._wait()
        self.bare_seconds.append((time.perf_counter() - began) / self._steps)

    def _dispatch(self) -> float:
        """Returns the seconds of a call that takes all that the step takes and computes nothing."""
        captured = self._compiled.get_concrete_function(*self._last).captured_inputs

        def nothing(batch: Any, control: tf.Tensor) -> tf.Tensor:
            for tensor in captured:
                tf.identity(tensor)
            return control

        call = FunctionPerShape(nothing)
        call(*self._last)
        seconds = []
        for _ in range(50):
            began = time.perf_counter()
            call(*self._last)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def _checkpoint(self) -> Iterator[None]:
        """Saves; the loop continues until the file is complete."""
        store = self.components.recording.store
        began = time.perf_counter()
        self._trainer.save_callback.save()
        blocked, steps = time.perf_counter() - began, 0
        while store is not None and store.writing:
            yield
            steps += 1
        seconds = time.perf_counter() - began
        self.more["checkpoint"] = {
            "blocked_seconds": blocked,
            "seconds": seconds,
            "steps_meanwhile": steps,
        }

    def _validation(self) -> dict[str, float]:
        """Validates the validation images, which traces the step, then all training images."""
        parts, config = self.components, self.components.config
        compute = str(parts.facts["precision"]).removeprefix("mixed_")
        step = EvaluationStep(parts.model, build.evaluation_preprocess(compute))
        for source in (parts.validation_source, parts.data.source):
            validation = Validation(
                step,
                source,
                parts.communicator,
                batch=config.evaluation.eval_batch or config.optimization.per_gpu_batch,
                image_size=config.network.image_size,
                crop_fraction=build.evaluation_crop(config.data),
                options=parts.data.options,
            )
            began = time.perf_counter()
            validation.run()
            seconds = time.perf_counter() - began
        per_image = seconds / parts.data.source.num_examples
        training = statistics.median(self.loop_seconds) / config.optimization.per_gpu_batch
        return {
            "images": parts.data.source.num_examples,
            "seconds_per_image": per_image,
            "share_of_training": per_image / training,
        }

    def report(self) -> dict[str, Any]:
        """Returns the measured figures as a JSON object."""
        config = self.components.config
        loop, bare = statistics.median(self.loop_seconds), statistics.median(self.bare_seconds)
        pairs = [b / a for a, b in zip(self.loop_seconds, self.bare_seconds, strict=True)]
        return {
            "benchmark": "loop",
            "model": config.network.model,
            "batch": config.optimization.per_gpu_batch,
            "image_size": config.network.image_size,
            "precision": self.components.facts["precision"],
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "images_per_second": config.optimization.per_gpu_batch / loop,
            "bare_images_per_second": config.optimization.per_gpu_batch / bare,
            "ratio": statistics.median(pairs),
            "ratios": pairs,
            "host_milliseconds": 1e3 * statistics.median(self.host_seconds),
            "data_wait_fraction": statistics.median(self.waited_seconds) / loop,
            "traces": self._compiled.experimental_get_tracing_count(),
            **self.more,
            "machine": processor(),
            "date": datetime.date.today().isoformat(),
        }
