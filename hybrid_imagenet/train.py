"""Assembles the parts of a run and runs it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import __version__, assemble, hardware, run_dir
from hybrid_imagenet.callbacks.batch_norm import BatchNormSync
from hybrid_imagenet.callbacks.broadcast import BroadcastInitialState
from hybrid_imagenet.callbacks.checkpoints import CheckpointCallback
from hybrid_imagenet.callbacks.logs import RecordLog
from hybrid_imagenet.callbacks.metrics import MetricAverage
from hybrid_imagenet.callbacks.numerics import NumericsGuard, WeightCheck
from hybrid_imagenet.callbacks.schedules import HyperparameterSchedule
from hybrid_imagenet.callbacks.stop import BestAndTarget
from hybrid_imagenet.checkpoint import Checkpoint, CheckpointStore
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import Config, checks, derived
from hybrid_imagenet.control import Control
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.errors import SharedError, UserError
from hybrid_imagenet.loop import Loop
from hybrid_imagenet.metrics import jsonl, live, summary
from hybrid_imagenet.metrics.accumulators import ClassificationSums, from_vector
from hybrid_imagenet.models import normalization
from hybrid_imagenet.numerics.sampling import Cursor
from hybrid_imagenet.restore import restore_arrays, restore_sums
from hybrid_imagenet.state import RunState
from hybrid_imagenet.step import Batch, EvaluationStep, TrainStep


def run(config: Config, communicator: Communicator) -> str:
    """Trains as configured; every rank calls it.

    Returns:
      Why the run ended: "" (all epochs), "target" or "preempted".

    Raises:
      UserError: for data or directories that cannot be used, before training; or for what training cannot survive.
    """
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    with _together(communicator):
        precision = hardware.choose_precision(config.precision, config.model)
        train_source, validation_source = assemble.sources(config)
        checks.check_data(config, train_source.num_examples, communicator.size)
    with _together(communicator):
        directory = _open_run(config) if communicator.rank == 0 else None
    session = _Session(config, communicator, directory, precision, train_source, validation_source)
    return session.run()


@contextlib.contextmanager
def _together(communicator: Communicator) -> Iterator[None]:
    """Ends all ranks with one message if a rank raises UserError inside."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    try:
        communicator.agree(message)
    except UserError as error:
        raise SharedError(str(error)) from None


def _open_run(config: Config) -> run_dir.RunDirectory:
    path = assemble.run_path(config)
    if config.run_dir is None:
        path = run_dir.newest_name(path) if config.resume else run_dir.free_name(path)
    return run_dir.RunDirectory(path, resume=config.resume)


def _view_mode(config: Config, communicator: Communicator) -> str:
    """Resolves `auto` where a launcher stands between us and the user's terminal.

    Open MPI gives every rank a pseudo-terminal, whatever it writes to itself; so a rank believes in a terminal only if
    the launch script, which sees the real one, says so.
    """
    if communicator.rank:
        return "none"
    if config.progress == "auto" and communicator.size > 1:
        return "live" if os.environ.get("HYBRID_IMAGENET_TERMINAL") == "1" else "plain"
    return config.progress


class _Session:
    """One start of a run on this rank: the parts and how they are wired."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        directory: run_dir.RunDirectory | None,
        precision: str,
        train_source: assemble.Source,
        validation_source: assemble.Source,
    ):
        self.config = config
        self.communicator = communicator
        self.directory = directory
        self.precision = precision
        self.train_source = train_source
        self.validation_source = validation_source
        self.state = RunState()
        self.batches = derived.batches(config)
        self.order = assemble.sample_order(config, train_source)
        self.model = assemble.model(config, precision, train_source.num_classes, communicator)
        self.schedule = assemble.schedule(config, communicator.size)
        self.optimizer = assemble.optimizer(config, precision, self.model, communicator)
        dtype = self.model.compute_dtype if precision == "float32" else precision.removeprefix("mixed_")
        self.step = TrainStep(
            self.model,
            self.optimizer,
            assemble.train_preprocess(config, dtype),
            communicator,
            label_smoothing=config.label_smoothing,
        )
        self.evaluation = EvaluationStep(self.model, assemble.evaluation_preprocess(dtype))
        self.options = assemble.host_options(config, tf.config.threading.get_intra_op_parallelism_threads() or 1)
        self.control = Control(config.checkpoint_every_seconds if communicator.rank == 0 else None)
        self.view = live.make_view(_view_mode(config, communicator), sys.stdout, config.epochs)
        self.store = CheckpointStore(directory.path / "checkpoints", config.keep) if directory else None
        self.writer: jsonl.MetricsWriter | None = None

    def run(self) -> str:
        """Restores, trains, sums up."""
        with _together(self.communicator):
            checkpoint = self._find_checkpoint()
        self._share_state(checkpoint)
        with _together(self.communicator):
            if checkpoint is not None:
                restore_arrays(checkpoint, self.variables())
        if self.directory is not None:
            self._start_records()
        self.control.install_signal_handlers()
        try:
            self._loop().run()
        finally:
            self.control.restore_signal_handlers()
        if self.directory is not None:
            self._finish_records()
        return self.state.stop

    def variables(self) -> dict[str, keras.Variable]:
        """Everything that training changes, by a stable name."""
        parts = {"model": self.model.variables, "optimizer": self.optimizer.variables}
        return {f"{part}/{i:04d}/{v.path}": v for part, values in parts.items() for i, v in enumerate(values)}

    def _find_checkpoint(self) -> Checkpoint | None:
        if self.store is None or self.directory is None or not self.config.resume:
            return None
        checkpoint = self.store.newest_good(self.view.message)
        if checkpoint is None and self.store.paths():
            raise UserError(f"--run_dir={self.directory.path}: none of its checkpoints can be read; start a new run")
        if checkpoint is None:
            self.view.message(f"no checkpoint in {self.directory.path}: starting from the beginning")
        return checkpoint

    def _share_state(self, checkpoint: Checkpoint | None) -> None:
        """Gives every rank the restored position and sums; the variables follow with the initial broadcast."""
        meta = self.communicator.broadcast_object(checkpoint.meta if checkpoint else None)
        if meta is not None:
            self.state = RunState.from_dict(meta["state"])
            self.optimizer.inner.enter_phase(meta["phase"])
            self.step.sums.restore(restore_sums(meta["epoch_sums"], self.communicator.rank, self.communicator.size))

    def _start_records(self) -> None:
        assert self.directory is not None
        values = json.loads(self.config.to_json())
        self.directory.write_json("config.json", {"flags": values, "version": __version__, **self._facts()})
        resume_step = self.state.step if self.directory.resumed else None
        self.writer = jsonl.MetricsWriter(self.directory.path / "metrics.jsonl", resume_step=resume_step)
        self.view.run_started(
            {
                "world_size": self.communicator.size,
                "images_per_epoch": self.train_source.num_examples,
                "steps_per_epoch": self.order.batches_in_epoch(self._global_batch()),
                "global_batch": self._global_batch(),
                "step": self.state.step,
                "epochs": self.order.position(self.state.cursor),
                "target": self.config.target[0] if self.config.target else None,
            }
        )
        facts = self._facts()
        self.view.message(
            f"{self.config.model}, {self.config.dataset} ({self.train_source.num_examples} training and "
            f"{self.validation_source.num_examples} validation images), {facts['world_size']} ranks x "
            f"{self.config.per_gpu_batch} images, {self.precision}, results in {self.directory.path}"
        )
        if self.state.step:
            self.view.message(
                f"resumed at epoch {self.order.position(self.state.cursor):.3f}, step {self.state.step}, learning rate "
                f"{self._rate_now():.4g}"
            )

    def _rate_now(self) -> float:
        start = self.order.position(self.state.cursor)
        return self.schedule(start, start, self._global_batch())["learning_rate"]

    def _facts(self) -> dict[str, Any]:
        return {
            "world_size": self.communicator.size,
            "precision": self.precision,
            "hosts": list(self.communicator.hosts),
            **hardware.describe(),
        }

    def _finish_records(self) -> None:
        assert self.directory is not None and self.writer is not None
        self.writer.close()
        values = summary.summarize(
            jsonl.read(self.writer.path),
            world_size=self.communicator.size,
            images_per_epoch=self.train_source.num_examples,
            targets=self.config.target,
            wall_seconds=self.state.seconds,
            stop=self.state.stop or "finished",
            run_dir=str(self.directory.path),
        )
        self.directory.write_json("summary.json", values)
        self.view.run_finished(values)

    def _loop(self) -> Loop:
        config = self.config
        return Loop(
            state=self.state,
            step=self.step,
            order=self.order,
            batches=self._batch_sizes,
            data=self._training_data,
            validate=self._validate,
            validate_after=self._validate_after,
            control=self.control,
            world_size=self.communicator.size,
            epochs=config.epochs,
            log_every=config.log_every_steps,
            callbacks=self._callbacks(),
        )

    def _callbacks(self) -> list[keras.callbacks.Callback]:
        """In the order of calls: what adds to a record stands before what writes it, and that before what saves."""
        config, communicator = self.config, self.communicator
        statistics = BatchNormSync(communicator.allreduce_sum, communicator.size, normalization.statistics(self.model))
        callbacks: list[keras.callbacks.Callback] = [
            BroadcastInitialState(communicator, lambda: list(self.variables().values())),
            HyperparameterSchedule(self.schedule, self.optimizer.inner),
            statistics,
            MetricAverage(communicator.allreduce_sum),
            NumericsGuard(self.optimizer, config.max_skipped_steps),
            WeightCheck(communicator.allgather_object, self.model.trainable_variables),
            BestAndTarget(self.state, config.stop_at_top1),
        ]
        if self.writer is not None:
            callbacks.append(RecordLog(self.writer, self.view))
        callbacks.append(
            CheckpointCallback(
                store=self.store,
                state=self.state,
                variables=self.variables,
                description=self._checkpoint_meta,
                synchronize=statistics.synchronize,
                every_epochs=config.checkpoint_every_epochs,
                every_steps=config.checkpoint_every_steps,
                last_epoch=config.epochs,
            )
        )
        return callbacks

    def _checkpoint_meta(self) -> Mapping[str, Any]:
        sums = self.step.sums.read()
        return {
            "model": self.config.model,
            "num_classes": self.train_source.num_classes,
            "image_size": self.config.image_size,
            "optimizer": self.config.optimizer,
            "phase": self.optimizer.inner.hyper["phase"],
            "world_size": self.communicator.size,
            "epoch_sums": self.communicator.allgather_object([sums.loss, sums.top1, sums.top5, sums.count]),
            "version": __version__,
        }

    def _training_data(self, cursor: Cursor) -> Iterator[Batch]:
        config = self.config
        return iter(
            pipeline.training(
                self.train_source,
                self.order,
                cursor,
                self._batch_sizes,
                self.communicator.rank,
                self.communicator.size,
                epochs=config.epochs,
                image_size=config.image_size,
                augmentation=config.augmentation,
                options=self.options,
            )
        )

    def _batch_sizes(self, epoch: int) -> tuple[int, int]:
        stage = self.batches.at(epoch)
        return stage.per_gpu_batch, stage.accumulation

    def _global_batch(self) -> int:
        return self.batches.at(self.state.cursor.epoch).global_batch(self.communicator.size)

    def _validate_after(self, epoch: int) -> bool:
        done = epoch + 1
        due = (
            done > self.config.eval_offset_epochs
            and (done - self.config.eval_offset_epochs) % (self.config.eval_every_epochs) == 0
        )
        return due or done == self.config.epochs

    def _validate(self) -> dict[str, float]:
        self.evaluation.sums.reset()
        batches = pipeline.evaluation(
            self.validation_source,
            self.config.eval_batch or self.config.per_gpu_batch,
            self.communicator.rank,
            self.communicator.size,
            image_size=self.config.image_size,
            crop_fraction=assemble.evaluation_crop(self.config),
            options=self.options,
        )
        for batch in batches:
            self.evaluation(batch)
        total: ClassificationSums = from_vector(
            self.communicator.allreduce_sum(self.evaluation.sums.variable.read_value(), "validation_sums")
        )
        return {**total.means("val"), "val_count": int(total.count)}
