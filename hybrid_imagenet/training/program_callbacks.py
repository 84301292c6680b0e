"""Lists the callbacks of the program, in the order in which the training loop calls them."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from hybrid_imagenet.callbacks.adabound_bounds import AdaBoundBounds
from hybrid_imagenet.callbacks.batch_norm_statistics import BatchNormStatistics, PreciseStatistics
from hybrid_imagenet.callbacks.lars_schedule import LARSSchedule
from hybrid_imagenet.callbacks.merge_batch_norm_statistics import MergeBatchNormStatistics
from hybrid_imagenet.callbacks.metrics_log import MetricsLog
from hybrid_imagenet.callbacks.profiler import Profiler
from hybrid_imagenet.callbacks.relative_updates import RelativeUpdates
from hybrid_imagenet.callbacks.save_checkpoints import SaveCheckpoints
from hybrid_imagenet.callbacks.skipped_steps_guard import SkippedStepsGuard
from hybrid_imagenet.callbacks.stall_watchdog import StallWatchdog
from hybrid_imagenet.callbacks.step_schedule import LearningRateSchedule
from hybrid_imagenet.callbacks.stop_at_target import StopAtTarget
from hybrid_imagenet.callbacks.swap_averaged_weights import SwapAveragedWeights
from hybrid_imagenet.callbacks.trust_ratio_log import TrustRatioLog
from hybrid_imagenet.callbacks.weight_check import WeightCheck
from hybrid_imagenet.models import normalization
from hybrid_imagenet.training.components import RunComponents
from hybrid_imagenet.training.cost_log import CostLog
from hybrid_imagenet.training.example_count import ExampleCount
from hybrid_imagenet.training.hyperparameter_log import HyperparameterLog
from hybrid_imagenet.training.loss_alarm_guard import LossAlarmGuard


def program_callbacks(
    components: RunComponents, save_callback: SaveCheckpoints
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of a run, in their order.

    1. The watchdog counts a step before another callback can wait or fail.
    2. The profiler starts before any other work of a step.
    3. The schedules set the values of the step. Each step belongs to one of the three.
    4. Logs and guards that read the values of the step. The guards stop a run that has diverged
       before it is validated, recorded or saved.
    5. The statistics of batch normalization are merged before validation, then the averaged weights
       replace the trained ones. In the other order, the statistics of the averaged weights would be
       merged into those of the trained ones.
    6. Logs that complete the record of an epoch. They gather values of all ranks, on every rank in
       the same order.
    7. The target, before the checkpoint, which contains the best accuracy.
    8. The record, after all callbacks that add to the logs.
    9. The checkpoint, after its record. If the program crashed between the two in the other order,
       the resumed run would begin after the epoch, and its record would be lost forever.

    Args:
      components: The components.
      save_callback: The callback that saves.
    """
    plan = components.plan
    step = components.step
    callbacks: list[keras.callbacks.Callback] = [StallWatchdog(watchdog=components.watchdog)]
    if plan.recording.profile_steps and components.recording.path is not None:
        first, last = plan.recording.profile_steps
        callbacks.append(
            Profiler(
                first,
                last,
                components.recording.path / "profile",
                wait=step.sums.read,
                log=components.recording.announce,
            )
        )
    callbacks += [AdaBoundBounds(), LARSSchedule(derives_coefficient=False), LearningRateSchedule()]
    weights = components.model.trainable_variables
    inner_optimizer = components.optimizer.inner
    callbacks += [
        RelativeUpdates([weights[i] for i in inner_optimizer.kernel_indices()]),
        HyperparameterLog(),
        SkippedStepsGuard(components.optimizer, plan.optimizer.max_skipped_steps),
        LossAlarmGuard(step),
        MergeBatchNormStatistics(
            collect=_precise_statistics(components)
            if plan.network.batch_norm == "precise"
            else None,
            merge_parts=lambda: normalization.merge_virtual_gpus(components.model),
            at_epoch_end=False,
            dtype=tf.float32,
        ),
    ]
    if components.optimizer.average is not None:
        measurement = BatchNormStatistics(
            components.communicator,
            normalization.trainable_statistics(components.model),
            _precise_statistics(components),
            lambda: normalization.merge_virtual_gpus(components.model),
        )
        callbacks.append(
            SwapAveragedWeights(
                components.optimizer.average,
                normalization.inference_statistics(components.model),
                measurement.synchronize,
            )
        )
    callbacks += [
        ExampleCount(components.data),
        TrustRatioLog(inner_optimizer, weights),
        WeightCheck(weights),
        CostLog(components.data.source.reads, save_callback, components.optimizer.reducer),
        StopAtTarget(plan.validation.stop_at_top1, monitor="val_top1"),
        MetricsLog(sink=components.recording),
        save_callback,
    ]
    return callbacks


def _precise_statistics(components: RunComponents) -> Callable[[], None]:
    """Returns the function that measures this rank's statistics over several batches."""
    return PreciseStatistics(
        components.step.forward,
        normalization.trainable_statistics(components.model),
        lambda: components.data.statistics_batches(
            components.state.finished_epochs, components.watchdog.record_progress
        ),
        components.state,
    ).collect
