"""Lists the Keras callbacks of a run, in the order in which they are called."""

from __future__ import annotations

import functools

import keras

from hybrid_imagenet.config import relative_step
from hybrid_imagenet.training.callbacks.broadcast import BroadcastInitialState
from hybrid_imagenet.training.callbacks.checkpoint_saver import CheckpointCallback
from hybrid_imagenet.training.callbacks.divergence import DivergenceGuard
from hybrid_imagenet.training.callbacks.example_count import ExampleCount
from hybrid_imagenet.training.callbacks.metric_average import MetricAverage
from hybrid_imagenet.training.callbacks.numeric_checks import NoiseScaleLog, NumericsGuard, TrustRatioLog, WeightCheck
from hybrid_imagenet.training.callbacks.profiler import Profiler
from hybrid_imagenet.training.callbacks.progress_notes import NoteProgress
from hybrid_imagenet.training.callbacks.record_log import EpochValues, RecordLog
from hybrid_imagenet.training.callbacks.schedules import HyperparameterSchedule
from hybrid_imagenet.training.callbacks.speed_monitor import Costs, WireHealthLog
from hybrid_imagenet.training.callbacks.target import BestAndTarget
from hybrid_imagenet.training.parts import Parts


def in_order(parts: Parts) -> list[keras.callbacks.Callback]:
    """Orders the callbacks: those that add to a record come before its writer, and the writer before the saver."""
    config, communicator, recording = parts.config, parts.communicator, parts.recording
    noise = []
    if config.gradient_noise_scale:
        gather = communicator.allgather_object
        noise = [NoiseScaleLog(parts.optimizer, gather, parts.data.sizes_of_rank, recording.announce)]
    profiler = []
    if config.profile_steps and recording.path is not None:
        folder = recording.path / "profile"
        profiler = [Profiler(config.profile_steps, folder, parts.step.sums.read, recording.announce)]
    parts.divergence = DivergenceGuard(
        parts.state,
        lambda: parts.step.alarm.read(parts.step.copies.read("alarm")),
        communicator.allgather_object,
        parts.step.alarm.highest,
        config.divergence_factor,
        lambda: parts.step.copies.behind,
    )
    log = [RecordLog(recording.writer, recording.view)] if recording.writer is not None else []
    checkpoints = CheckpointCallback(
        store=recording.store,
        state=parts.state,
        variables=parts.variables,
        description=parts.checkpoint_meta,
        synchronize=parts.synchronize,
        every_epochs=config.checkpoint_every_epochs,
        every_steps=config.checkpoint_every_steps,
        is_last=lambda done: parts.data.length.reached(parts.state.cursor, parts.state.step),
        save_best=config.keep_best,
        save_first=parts.rollback is not None,
        first_top1=parts.restored_top1,
    )
    return [
        *profiler,
        NoteProgress(parts.watchdog.note),
        BroadcastInitialState(communicator, lambda: list(parts.variables().values())),
        HyperparameterSchedule(
            parts.schedule, parts.optimizer.inner, parts.state, functools.partial(relative_step.at_step, config)
        ),
        parts.statistics,
        *parts.averaged,
        EpochValues(parts.data.facts),
        ExampleCount(parts.data, parts.state, communicator.allgather_object),
        MetricAverage(communicator.allreduce_sum),
        NumericsGuard(parts.optimizer, config.max_skipped_steps, parts.step.copies.read),
        parts.divergence,
        TrustRatioLog(parts.optimizer.inner, parts.model.trainable_variables),
        parts.updates,
        *noise,
        WeightCheck(communicator.allgather_object, parts.model.trainable_variables),
        Costs(communicator, parts.data.source.io_statistics, checkpoints.take_seconds),
        WireHealthLog(communicator, recording.announce),
        BestAndTarget(parts.state, config.stop_at_top1),
        *log,
        checkpoints,
    ]
