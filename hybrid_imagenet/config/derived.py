"""Computes batches, image sizes and the schedule from flags.

Completing and checking the flags needs these values, and so does `run_plan.make`. All other code
takes them from the `RunPlan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_imagenet.optimizers.registry import OPTIMIZERS, AdaBoundOptions
from hybrid_imagenet.options import flag_values
from hybrid_imagenet.schedules import batch_schedule, mlperf, training_schedule
from hybrid_imagenet.schedules.training_schedule import AdamScaling, scale_learning_rate

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig
    from hybrid_imagenet.config.flags import NetworkFlags


def batches(config: RunConfig) -> batch_schedule.BatchSchedule:
    """Returns the batch of each epoch.

    Raises:
      ValueError: For a --batch_schedule that cannot be parsed.
    """
    optimization = config.optimization
    return batch_schedule.parse_batches(
        optimization.batch_schedule,
        optimization.per_gpu_batch,
        optimization.gradient_accumulation_steps,
        optimization.batch_growth,
        config.run.epochs,
    )


def first_batch(config: RunConfig) -> batch_schedule.BatchStage:
    """Returns the batch with which training starts.

    It is the first one of a --batch_schedule with numbers of images, else --per_gpu_batch.

    Raises:
      ValueError: For a --batch_schedule that cannot be parsed.
    """
    optimization = config.optimization
    if optimization.batch_schedule:
        first_entry = optimization.batch_schedule[0]
        if ":" in first_entry and "*" not in first_entry:
            return batches(config).at(0)
    return batch_schedule.BatchStage(
        0, optimization.per_gpu_batch, optimization.gradient_accumulation_steps
    )


def base_batch(config: RunConfig) -> int:
    """Returns the images per update of all GPUs at the start of the run."""
    return batches(config).at(0).global_batch(config.gpus)


def sizes(network: NetworkFlags) -> batch_schedule.ImageSizes:
    """Returns the size of training images in each epoch.

    Raises:
      ValueError: For an --image_size_schedule that cannot be parsed.
    """
    return batch_schedule.parse_sizes(network.image_size_schedule, network.image_size)


def peak_learning_rate(config: RunConfig) -> float:
    """Returns the peak of --lr after --lr_scaling, or that of a schedule with its own peak."""
    own_peak = config.schedule_options.own_peak
    if own_peak is not None:
        return own_peak
    optimization = config.optimization
    return scale_learning_rate(
        optimization.lr, optimization.lr_scaling, config.gpus, base_batch(config)
    )


def adam_learning_rate(config: RunConfig, learning_rate: float) -> float:
    """Returns a learning rate of Adam inside AdaBound for all GPUs."""
    scaling = config.rule(AdamScaling)
    is_scaled = scaling is not None and scaling.adabound_lr_scaling
    return learning_rate * (config.gpus if is_scaled else 1)


def schedule(config: RunConfig) -> training_schedule.Schedule:
    """Returns learning rate, momentum and bounds as a function of the fractional epoch.

    For --optimizer=adabound the scheduled rate is that of Adam. The rate of SGD, at which the
    bounds close, follows it.
    """
    method = OPTIMIZERS[config.optimization.optimizer]
    options = config.optimizer_options
    values = config.as_dict()
    arguments = {name: values[name] for name in training_schedule.CREATE_FLAGS if name in values}
    arguments |= flag_values(config.schedule_options)
    arguments |= {
        "epochs": schedule_end(config),
        "workers": config.gpus,
        "base_batch": base_batch(config),
        "bounded_warmup": method.bounded_warmup,
    }
    if isinstance(options, AdaBoundOptions):
        adam_rate = adam_learning_rate(config, options.learning_rate)
        arguments |= {"lr": adam_rate, "lr_scaling": "none"}
    return training_schedule.create(**arguments)


def schedule_end(config: RunConfig) -> float:
    """Returns the epoch at which a schedule that decays to 0 reaches it.

    It is --epochs. MLPerf's table has fractions of epochs, which --epochs rounds.
    """
    if config.optimization.lr_schedule == "mlperf":
        end = mlperf.point_at(base_batch(config)).schedule_epochs
        if config.run.epochs == round(end):
            return end
    return float(config.run.epochs)
