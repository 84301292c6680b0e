"""Derives values from a configuration: batches, learning rates, and arguments of constructors."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.data import splits
from hybrid_imagenet.errors import SharedError, UserError, pluralize
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import options_of
from hybrid_imagenet.schedules import batch_schedule, mlperf, relative_step, training_schedule
from hybrid_imagenet.schedules.training_schedule import REFERENCE_BATCH, scale_learning_rate

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig
    from hybrid_imagenet.config.flags import DataFlags, NetworkFlags


def batches(config: RunConfig) -> batch_schedule.BatchSchedule:
    """Returns the batch of each epoch.

    Raises:
      ValueError: for a --batch_schedule that cannot be parsed.
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
      ValueError: for a --batch_schedule that cannot be parsed.
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
      ValueError: for an --image_size_schedule that cannot be parsed.
    """
    return batch_schedule.parse_sizes(network.image_size_schedule, network.image_size)


def evaluation_size(config: RunConfig) -> int:
    """Returns the side of validation images, in pixels."""
    return config.evaluation.eval_image_size or config.network.image_size


def evaluation_offset(config: RunConfig) -> float:
    """Returns the epoch after which --eval_every_epochs counts.

    With MLPerf's table, a validation falls on the epoch in which the target accuracy is expected,
    as MLPerf's rules allow. Else it is 0.
    """
    if config.optimization.lr_schedule != "mlperf":
        return 0.0
    return mlperf.point_at(base_batch(config)).evaluation_offset(
        config.evaluation.eval_every_epochs
    )


def validated_split(data: DataFlags) -> str:
    """Returns which images are validated.

    Returns:
      `tuning` for the images that --tuning_split holds out, else `validation`.
    """
    return data.eval_split if data.tuning_split else "validation"


def held_out(data: DataFlags, num_examples: int) -> int:
    """Returns the number of training images that --tuning_split holds out.

    Raises:
      UserError: if no image is left to train on, or none to tune on.
    """
    try:
        return splits.num_held_out(data.tuning_split, num_examples)
    except ValueError as error:
        raise UserError(f"--tuning_split={data.tuning_split:g}: {error}") from None


def batch_norm_groups(config: RunConfig) -> tuple[int, int]:
    """Returns over which images batch normalization computes its statistics.

    Returns:
      The number of equal parts of a rank's batch that are normalized separately, and the number of
      neighboring ranks whose batches are normalized together. One of the two is 1.
    """
    if config.network.sync_batch_norm:
        return 1, config.ranks
    group = config.network.bn_group
    virtual_gpus = config.optimization.virtual_gpus
    if group <= virtual_gpus:
        return virtual_gpus // group, 1
    return 1, group // virtual_gpus


def check_groups(config: RunConfig) -> None:
    """Checks --bn_group and --sync_batch_norm against the number of GPUs.

    Raises:
      SharedError: if the groups do not contain all GPUs, or XLA would have to compile sums over
        ranks, which it cannot. All ranks raise the same error.
    """
    network = config.network
    gpus = config.gpus
    if gpus % network.bn_group:
        raise SharedError(
            f"--bn_group={network.bn_group} does not divide {gpus} GPUs. Set it to a divisor of"
            f" {gpus}."
        )
    _, num_ranks = batch_norm_groups(config)
    if network.jit_compile and num_ranks > 1:
        flag = "sync_batch_norm" if network.sync_batch_norm else f"bn_group={network.bn_group}"
        raise SharedError(
            f"--{flag} cannot be combined with --jit_compile, because XLA cannot compile sums over"
            " ranks. Omit one of them."
        )


def peak_learning_rates(config: RunConfig) -> dict[str, float]:
    """Returns the peak of each learning rate, by its flag.

    Returns:
      `lr` after --lr_scaling and, if the optimizer has AdaBound, `adabound_lr`.
    """
    peaks = {
        "lr": scale_learning_rate(
            config.optimization.lr, config.optimization.lr_scaling, config.gpus, base_batch(config)
        )
    }
    if "adabound_lr" in config.optimizer_options:
        workers = config.gpus if config.optimizer_options["adabound_lr_scaling"] else 1
        peaks["adabound_lr"] = config.optimizer_options["adabound_lr"] * workers
    return peaks


def peak_learning_rate(config: RunConfig) -> float:
    """Returns the largest learning rate of a run."""
    values = schedule(config)
    stages = batches(config)
    peak = 0.0
    for epoch in peak_epochs(config):
        batch = stages.at(int(epoch)).global_batch(config.gpus)
        peak = max(peak, values(epoch, epoch, batch)["learning_rate"])
    return peak


def peak_epochs(config: RunConfig) -> list[float]:
    """Returns the fractional epochs at which a schedule can have its peak.

    They are the starts of epochs, and the times just before and after the warmup.
    """
    optimization = config.optimization
    ramp = config.optimizer_options.get("hybrid_ramp_epochs", 0.0)
    ends_of_warmup = (
        math.nextafter(optimization.warmup_epochs, 0),
        optimization.warmup_epochs,
        optimization.warmup_epochs + ramp,
    )
    epochs = {float(epoch) for epoch in range(math.ceil(config.run.epochs))}
    epochs |= {epoch for epoch in ends_of_warmup if epoch < config.run.epochs}
    return sorted(epochs)


def schedule(config: RunConfig) -> training_schedule.Schedule:
    """Returns learning rate, momentum and bounds as a function of the fractional epoch.

    For --optimizer=adabound the scheduled rate is that of Adam. The rate of SGD, at which the
    bounds close, follows it.
    """
    method = OPTIMIZERS[config.optimization.optimizer]
    values = config.values()
    arguments = {name: values[name] for name in training_schedule.CREATE_FLAGS if name in values}
    arguments |= config.schedule_options
    arguments |= {
        "epochs": schedule_end(config),
        "workers": config.gpus,
        "base_batch": base_batch(config),
        "bounded_warmup": method.bounded_warmup,
    }
    if method.rate != "lr":
        arguments |= {"lr": peak_learning_rates(config)[method.rate], "lr_scaling": "none"}
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


def optimizer_arguments(config: RunConfig) -> dict[str, Any]:
    """Returns the arguments of `optimizers.create`."""
    method = OPTIMIZERS[config.optimization.optimizer]
    arguments: dict[str, Any] = {
        known.name: config.optimizer_options[flag]
        for flag, known in options_of(method.options).items()
    }
    peaks = peak_learning_rates(config)
    learning_rate = peaks[method.rate]
    if config.optimization.lr_schedule in training_schedule.FIXED_SCHEDULES:
        learning_rate = peak_learning_rate(config)
    derived_arguments = peaks | {"learning_rate": learning_rate, "final_lr": peaks["lr"]}
    if config.optimizer_options.get("decoupled_decay"):
        derived_arguments["weight_decay"] = decoupled_decay(config)
    names = {field.name for field in dataclasses.fields(method.options)}
    for name, value in derived_arguments.items():
        if name in names:
            arguments[name] = value
    return {"optimizer": config.optimization.optimizer, **arguments}


def decoupled_decay(config: RunConfig) -> float:
    """Returns the fraction of the weights that a step subtracts at the peak of the learning rate.

    --weight_decay is this fraction for a batch of 256 images. It grows with the batch, so that an
    epoch subtracts the same fraction at every batch.
    """
    return float(config.optimizer_options["weight_decay"]) * base_batch(config) / REFERENCE_BATCH


def gradient_factor(config: RunConfig, momentum: float) -> float:
    """Returns the factor of the gradient in the velocity of LARS, see `relative_step`."""
    handover = config.optimizer_options.get("hybrid_handover")
    return float(relative_step.gradient_factor(handover, momentum))


def communication(config: RunConfig) -> CommunicationSettings:
    """Returns the settings with which ranks communicate.

    Raises:
      SharedError: if groups for normalization do not contain all GPUs.
    """
    check_groups(config)
    _, num_ranks = batch_norm_groups(config)
    shared_flags = dataclasses.asdict(config.communication)
    # It belongs to the optimizer.
    del shared_flags["compression"]
    return CommunicationSettings(
        **shared_flags,
        options=config.allreduce_options,
        neighbors=num_ranks if num_ranks < config.ranks else 1,
        deterministic=config.run.deterministic,
    )


def title(config: RunConfig) -> str:
    """Returns the title of a run: network, dataset, number of ranks and batch."""
    optimization = config.optimization
    batch = pluralize(config.ranks, "rank")
    if optimization.virtual_gpus > 1:
        batch += f" x {optimization.virtual_gpus} virtual GPUs"
    batch += f" x {optimization.per_gpu_batch} images"
    return f"{config.network.model} on {config.data.dataset}, {batch}"
