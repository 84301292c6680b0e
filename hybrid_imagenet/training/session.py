"""Wires the parts of a run on one rank: restore, train, validate, save."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import comm
from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.checkpoints.restore import check_position, restore_arrays
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import Config, relative_step
from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import normalization
from hybrid_imagenet.numerics import schedules
from hybrid_imagenet.resilience import preemption, rollback
from hybrid_imagenet.resilience.elastic_state import Survivor
from hybrid_imagenet.resilience.preemption import Control
from hybrid_imagenet.resilience.watchdog import Watchdog
from hybrid_imagenet.training import accumulators, build, hardware, loss_alarm, step
from hybrid_imagenet.training.callbacks.averaged_weights import AveragedWeights
from hybrid_imagenet.training.callbacks.batch_norm import BatchNormSync, PreciseStatistics
from hybrid_imagenet.training.callbacks.broadcast import BroadcastInitialState
from hybrid_imagenet.training.callbacks.checkpoint_saver import CheckpointCallback
from hybrid_imagenet.training.callbacks.divergence import DivergenceGuard
from hybrid_imagenet.training.callbacks.elastic_commits import CommitCallback
from hybrid_imagenet.training.callbacks.epoch_facts import EpochFacts
from hybrid_imagenet.training.callbacks.example_count import ExampleCount, gathered
from hybrid_imagenet.training.callbacks.histograms import Histograms, distributions
from hybrid_imagenet.training.callbacks.metric_average import MetricAverage
from hybrid_imagenet.training.callbacks.nan_guard import NoiseScaleLog, NumericsGuard, TrustRatioLog, WeightCheck
from hybrid_imagenet.training.callbacks.profiler import Profiler
from hybrid_imagenet.training.callbacks.progress_notes import NoteProgress
from hybrid_imagenet.training.callbacks.record_log import RecordLog
from hybrid_imagenet.training.callbacks.schedules import HyperparameterSchedule
from hybrid_imagenet.training.callbacks.speed_monitor import Costs, WireHealthLog
from hybrid_imagenet.training.callbacks.target import BestAndTarget
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.inputs import TrainingData
from hybrid_imagenet.training.loop import Loop
from hybrid_imagenet.training.recorder import Recording
from hybrid_imagenet.training.step import EvaluationStep, TrainStep


@contextlib.contextmanager
def together(communicator: Communicator) -> Iterator[None]:
    """Ends all ranks with one message if a rank raises UserError inside."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    communicator.agree(message)


class Session:
    """One start of a run on this rank: the parts and how they are wired."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        recording: Recording,
        precision: str,
        train_source: Source,
        validation_source: Source,
        rollback: rollback.Rollback | None = None,
        survivor: Survivor | None = None,
    ):
        """Builds the parts; the same on every rank.

        With `rollback` it goes on from the last good checkpoint, else from what a survivor remembers.
        """
        self.config = config
        self.communicator = communicator
        self.recording = recording
        self.rollback = rollback
        self.memory = survivor.memory if survivor else None
        self.validation_source = validation_source
        self.state = RunState()
        self.restored_top1: float | None = None
        self.watchdog = Watchdog(
            communicator,
            config.stall_seconds,
            waits_in=(comm, preemption, accumulators, loss_alarm, step),
            elastic=survivor is not None,
            guardian=survivor.guardian if survivor else None,
        )
        options = build.host_options(config, tf.config.threading.get_intra_op_parallelism_threads() or 1)
        order = build.sample_order(config, train_source)
        self.data = TrainingData(config, train_source, order, communicator, options)
        self.model = build.model(config, precision, train_source.num_classes, communicator)
        self.schedule = build.schedule(config, communicator.size)
        self.optimizer = build.optimizer(config, precision, self.model, communicator)
        compute = precision.removeprefix("mixed_")
        self.step = TrainStep(
            self.model,
            self.optimizer,
            build.train_preprocess(config, compute),
            communicator,
            label_smoothing=config.label_smoothing,
            mixup=config.mixup,
            xla=config.xla,
        )
        self.statistics = self._statistics(precise=config.batch_norm == "precise")
        self.averaged = self._averaged()
        self.validation = Validation(
            EvaluationStep(self.model, build.evaluation_preprocess(compute)),
            validation_source,
            communicator,
            batch=config.eval_batch or config.per_gpu_batch,
            image_size=config.image_size,
            crop_fraction=build.evaluation_crop(config),
            options=options,
        )
        self.facts = {
            "world_size": communicator.size,
            "precision": precision,
            "hosts": list(communicator.hosts),
            "train_images": train_source.num_examples,
            "validation_images": validation_source.num_examples,
            "num_classes": train_source.num_classes,
            **hardware.describe(),
        }

    def run(self) -> str:
        """Restores, trains, sums up."""
        self.watchdog.start()
        try:
            self._train()
        finally:
            self.watchdog.stop()
        self.recording.finish(
            world_size=self.communicator.size,
            train_images=self.data.source.num_examples,
            seconds=self.state.seconds,
            stop=self.state.stop,
        )
        return self.state.stop

    def _train(self) -> None:
        if self.memory is not None:
            path = self.communicator.broadcast_object(str(self.recording.path))
            self.memory.run_dir = pathlib.Path(path)
        with together(self.communicator):
            checkpoint = self._find_checkpoint()
        self._share_state(checkpoint)
        with together(self.communicator):
            if checkpoint is not None:
                restore_arrays(checkpoint, self.variables())
                check_position(checkpoint, self.data.source.num_examples)
            self.recording.start(self.facts, self._info(), self.state)
        for loss in (*self.data.source.losses, *self.validation_source.losses):
            self.recording.announce(f"damaged shard: {loss}")
        if self.rollback:
            self.recording.rolled_back(self.rollback, self.state.step, self._rate_factor())
        elif self.memory is not None and self.memory.checkpoint is not None:
            lost = self.memory.last_step - self.state.step
            self.recording.regrouped(self.memory.world_size, self.communicator.size, self.state, lost)
        if self.state.step:
            self.recording.announce(self._resumed())
        control = Control(self.config.checkpoint_every_seconds if self.communicator.rank == 0 else None)
        control.install_signal_handlers()
        self.communicator.watch_hosts(control.request_regroup)
        try:
            self._loop(control).run()
        finally:
            control.restore_signal_handlers()

    def _find_checkpoint(self) -> Checkpoint | None:
        """What to restore on this rank."""
        if self.rollback:
            return self.recording.last_good_checkpoint(self.rollback)
        if self.memory is not None and self.memory.checkpoint is not None:
            return self.memory.recall() if self.communicator.rank == 0 else None
        return self.recording.find_checkpoint()

    def variables(self) -> dict[str, keras.Variable]:
        """Everything that training changes, by a stable name."""
        parts = {"model": self.model.variables, "optimizer": self.optimizer.variables}
        found = {f"{part}/{i:04d}/{v.path}": v for part, values in parts.items() for i, v in enumerate(values)}
        averages = [pair for part in self.averaged for pair in part.variables.items()]
        return found | {f"average/{i:04d}/{path}": v for i, (path, v) in enumerate(averages)}

    def _share_state(self, checkpoint: Checkpoint | None) -> None:
        """Gives every rank the restored position and sums; the variables follow with the initial broadcast."""
        meta = self.communicator.broadcast_object(checkpoint.meta if checkpoint else None)
        if meta is not None:
            self.state = RunState.from_dict(meta["state"])
            self.restored_top1 = meta.get("val_top1")
            if self.state.hyper:
                self.optimizer.inner.enter_phase(self.state.hyper["phase"])
                self.optimizer.inner.hyper.assign(self.state.hyper)
            rank, size = self.communicator.rank, self.communicator.size
            self.data.restore_counts(meta.get("counts"), self.state.cursor)
            self.step.sums.restore(accumulators.restore_sums(meta["epoch_sums"], rank, size))
            if len(meta["square_norms"]) == size:  # on other ranks the estimate of the epoch begins anew
                self.optimizer.square_norms.assign(meta["square_norms"][rank])
        if self.rollback:
            self.state.rollbacks, self.state.seconds = self.rollback.count, self.rollback.seconds
        self.schedule = schedules.scaled(self.schedule, self._rate_factor())

    def _rate_factor(self) -> float:
        return float(self.config.rollback_lr_factor**self.state.rollbacks)

    def _info(self) -> dict[str, Any]:
        """What the view knows beforehand."""
        imagenet = self.config.model == "resnet50" and self.data.source.num_classes == 1000
        return {
            "world_size": self.communicator.size,
            "optimizer": self.config.optimizer,
            "images_per_epoch": self.data.source.num_examples,
            "steps_per_epoch": self.data.order.batches_in_epoch(self._global_batch()),
            "global_batch": self._global_batch(),
            "reference_batch": self._global_batch() if imagenet else None,
            "step": self.state.step,
            "finished_epochs": self.state.finished_epochs,
            "epochs": self.data.order.position(self.state.cursor),
            "target": self.config.target[0] if self.config.target else None,
            "single_gpu_images_per_second": self.recording.single_gpu,
        }

    def _resumed(self) -> str:
        start = self.data.order.position(self.state.cursor)
        rate = self.schedule(start, start, self._global_batch())["learning_rate"]
        return f"resumed at epoch {start:.3f}, step {self.state.step}, learning rate {rate:.4g}"

    def _loop(self, control: Control) -> Loop:
        config = self.config
        return Loop(
            state=self.state,
            step=self.step,
            order=self.data.order,
            batches=self.data.sizes,
            data=self.data.stream,
            validate=self._validate,
            validate_after=self._validate_after,
            control=control,
            world_size=self.communicator.size,
            epochs=config.epochs,
            log_every=config.log_every_steps,
            callbacks=self._callbacks(),
        )

    def _validate(self) -> dict[str, Any]:
        """One pass over the images that are validated, and which these are."""
        return {"val_split": build.validated_split(self.config), **self.validation.run(self.watchdog.note)}

    def _callbacks(self) -> list[keras.callbacks.Callback]:
        """In the order of calls: what adds to a record stands before what writes it, and that before what saves."""
        config, communicator, recording = self.config, self.communicator, self.recording
        noise = []
        if config.gradient_noise_scale:
            noise = [NoiseScaleLog(self.optimizer, communicator.allgather_object, self.data.sizes, recording.announce)]
        profiler = []
        if config.profile_steps and recording.path is not None:
            folder = recording.path / "profile"
            profiler = [Profiler(config.profile_steps, folder, self.step.sums.read, recording.announce)]
        histograms = []
        if config.histograms and recording.board is not None:
            tags = distributions(self.optimizer.inner, self.model.trainable_variables)
            histograms = [Histograms(recording.board.histogram, tags)]
        self.divergence = DivergenceGuard(
            self.state,
            self.step.alarm.read,
            communicator.allgather_object,
            self.step.alarm.highest,
            config.divergence_factor,
        )
        log = [RecordLog(recording.writer, recording.view)] if recording.writer is not None else []
        checkpoints = CheckpointCallback(
            store=recording.store,
            state=self.state,
            variables=self.variables,
            description=self._checkpoint_meta,
            synchronize=self._synchronize,
            every_epochs=config.checkpoint_every_epochs,
            every_steps=config.checkpoint_every_steps,
            last_epoch=config.epochs,
            save_best=config.keep_best,
            save_first=self.rollback is not None,
            first_top1=self.restored_top1,
        )
        return [
            *profiler,
            NoteProgress(self.watchdog.note),
            BroadcastInitialState(communicator, lambda: list(self.variables().values())),
            HyperparameterSchedule(
                self.schedule, self.optimizer.inner, self.state, functools.partial(relative_step.at_step, config)
            ),
            self.statistics,
            *self.averaged,
            EpochFacts(self.data.facts),
            ExampleCount(self.data, communicator.allgather_object, recording.announce),
            MetricAverage(communicator.allreduce_sum),
            NumericsGuard(self.optimizer, config.max_skipped_steps),
            self.divergence,
            TrustRatioLog(self.optimizer.inner, self.model.trainable_variables),
            *noise,
            WeightCheck(communicator.allgather_object, self.model.trainable_variables),
            Costs(communicator, self.data.source.io_statistics, checkpoints.take_seconds),
            WireHealthLog(communicator, recording.announce),
            BestAndTarget(self.state, config.stop_at_top1),
            *log,
            *histograms,
            checkpoints,
            *self._commits(),
        ]

    def _commits(self) -> list[CommitCallback]:
        """What keeps the state of elastic ranks in memory."""
        if self.memory is None:
            return []
        commits = CommitCallback(
            self.memory,
            state=self.state,
            variables=self.variables,
            description=self._checkpoint_meta,
            synchronize=self._synchronize,
            every_steps=self.config.commit_every_steps,
            world_size=self.communicator.size,
        )
        return [commits]

    def _statistics(self, *, precise: bool) -> BatchNormSync:
        """What merges the statistics of normalization over ranks, measured anew for the weights in place or not."""
        layers, collect = normalization.statistics(self.model), None
        if precise:
            collect = PreciseStatistics(
                self.step.forward,
                layers,
                lambda: self.data.sample(self.state.finished_epochs, self.watchdog.note),
                lambda: self.state.step,
            ).collect
        return BatchNormSync(self.communicator.allreduce_sum, self.communicator.size, layers, collect)

    def _synchronize(self) -> None:
        """Readies the statistics for a checkpoint, or ends a run that has diverged; every rank calls it."""
        self.divergence.look()
        self.statistics.synchronize()
        for part in self.averaged:
            part.refresh()

    def _averaged(self) -> list[AveragedWeights]:
        """The averaged weights of --ema_decay, if there are any."""
        if self.optimizer.average is None:
            return []
        pairs, measure = normalization.statistics(self.model), self._statistics(precise=True).synchronize
        return [AveragedWeights(self.model, self.optimizer.average, pairs, measure, lambda: self.state.step)]

    def _checkpoint_meta(self) -> Mapping[str, Any]:
        sums = self.step.sums.read()
        return {
            **build.description(self.config, self.data.source),
            "world_size": self.communicator.size,
            "epoch_sums": self.communicator.allgather_object([sums.loss, sums.top1, sums.top5, sums.count]),
            "counts": gathered(self.data, self.state.finished_epochs, self.communicator.allgather_object),
            "square_norms": self.communicator.allgather_object(self.optimizer.square_norms.numpy().tolist()),
        }

    def _global_batch(self) -> int:
        return self.data.global_batch(self.state.cursor.epoch)

    def _validate_after(self, epoch: int) -> bool:
        done = epoch + 1
        since = done - self.config.eval_offset_epochs
        return done == self.config.epochs or (since > 0 and since % self.config.eval_every_epochs == 0)
