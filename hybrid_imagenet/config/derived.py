"""Derives settings by batch, and arguments of optimizer and schedule, from a configuration and a
number of workers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.comm.settings import CommunicationFlags, CommunicationSettings
from hybrid_imagenet.config.flags import options_for
from hybrid_imagenet.data import splits
from hybrid_imagenet.errors import SharedError, UserError, pluralize
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import options_of
from hybrid_imagenet.schedules import batch_schedule, mlperf, training_schedule
from hybrid_imagenet.schedules.training_schedule import REFERENCE_BATCH, scale_learning_rate

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig


def batches(config: RunConfig) -> batch_schedule.BatchSchedule:
    """The batch by epoch.

    Raises:
      ValueError: for a --batch_schedule that cannot be read.
    """
    return batch_schedule.parse_batches(
        config.batch_schedule,
        config.per_gpu_batch,
        config.gradient_accumulation_steps,
        config.batch_growth,
        config.epochs,
    )


def first_batch(config: RunConfig) -> batch_schedule.BatchStage:
    """The batch with which a --batch_schedule of numbers begins, else that of --per_gpu_batch;
    errors as `batches`.
    """
    if (
        config.batch_schedule
        and ":" in config.batch_schedule[0]
        and "*" not in config.batch_schedule[0]
    ):
        return batches(config).at(0)
    return batch_schedule.BatchStage(0, config.per_gpu_batch, config.gradient_accumulation_steps)


def sizes(config: RunConfig) -> batch_schedule.ImageSizes:
    """The size of training images by epoch.

    Raises:
      ValueError: for an --image_size_schedule that cannot be read.
    """
    return batch_schedule.parse_sizes(config.image_size_schedule, config.image_size)


def validated_split(config: RunConfig) -> str:
    """The images that are validated: `validation`, or `tuning` for those that --tuning_split keeps
    apart.
    """
    return config.eval_split if config.tuning_split else "validation"


def evaluation_size(config: RunConfig) -> int:
    """The side of validation images, in pixels."""
    return config.eval_image_size or config.image_size


def normalized_together(config: RunConfig) -> tuple[int, int]:
    """Whose images share the statistics of batch normalization (--sync_batch_norm, --bn_group).

    Returns:
      The equal parts of a rank's batch that are normalized each by itself, and the number of
      neighbouring ranks whose batches are normalized together; one of the two is 1.
    """
    if config.sync_batch_norm:
        return 1, config.ranks
    if config.bn_group <= config.virtual_gpus:
        return config.virtual_gpus // config.bn_group, 1
    return 1, config.bn_group // config.virtual_gpus


def check_groups(config: RunConfig) -> None:
    """Checks the groups that normalize together (--bn_group, --sync_batch_norm) against the number
    of GPUs.

    Raises:
      SharedError: as all ranks find the same, if groups do not hold all GPUs, or XLA would have to
        compile sums over ranks: it knows neither Horovod's nor TensorFlow's on a CPU.
    """
    gpus = config.gpus
    if gpus % config.bn_group:
        raise SharedError(
            f"--bn_group={config.bn_group}: {gpus} GPUs do not make whole groups; give a divisor of"
            f" {gpus}"
        )
    if config.jit_compile and normalized_together(config)[1] > 1:
        flag = "sync_batch_norm" if config.sync_batch_norm else f"bn_group={config.bn_group}"
        raise SharedError(
            f"--{flag} sums statistics over ranks in the pass that --jit_compile compiles, which"
            " XLA cannot: omit one"
        )


def held_out(config: RunConfig, num_examples: int) -> int:
    """Returns the number of training images that --tuning_split keeps apart.

    Raises:
      UserError: if nothing would be left to train on, or to tune on.
    """
    try:
        return splits.num_held_out(config.tuning_split, num_examples)
    except ValueError as error:
        raise UserError(f"--tuning_split={config.tuning_split:g}: {error}") from None


def base_batch(config: RunConfig) -> int:
    """Images per update of all GPUs at the start of the run."""
    return batches(config).at(0).global_batch(config.gpus)


def gradient_factor(config: RunConfig, momentum: float) -> float:
    """The factor in front of the gradient in LARS's velocity: 1 - momentum where hybrid continues
    averaging, else 1.
    """
    return 1 - momentum if config.chosen.get("hybrid_handover") == "continuous" else 1.0


def schedule_end(config: RunConfig) -> float:
    """The epoch at which a schedule that decays to 0 does so: --epochs, or the end in MLPerf's
    table that it rounds.
    """
    if config.lr_schedule == "mlperf":
        end = mlperf.point_at(base_batch(config)).schedule_epochs
        if config.epochs == round(end):
            return end
    return float(config.epochs)


def evaluation_offset(config: RunConfig) -> float:
    """Returns the epoch after which --eval_every_epochs counts.

    With MLPerf's table, a validation falls on the epoch in which the target accuracy is expected,
    as MLPerf's rules allow. Else it is 0.
    """
    if config.lr_schedule != "mlperf":
        return 0.0
    return mlperf.point_at(base_batch(config)).evaluation_offset(config.eval_every_epochs)


def rates(config: RunConfig) -> dict[str, float]:
    """Returns the peak of each learning rate by its flag: lr after linear scaling, and Adam's rate
    in AdaBound.
    """
    found = {
        "lr": scale_learning_rate(config.lr, config.lr_scaling, config.gpus, base_batch(config))
    }
    if "adabound_lr" in config.chosen:
        workers = config.gpus if config.chosen["adabound_lr_scaling"] else 1
        found["adabound_lr"] = config.chosen["adabound_lr"] * workers
    return found


def peak_epochs(config: RunConfig) -> list[float]:
    """Fractional epochs among which a schedule has its peak: starts of epochs, and both sides of
    the warmup's end.
    """
    ramp = config.chosen.get("hybrid_ramp_epochs", 0.0)
    ends = (
        math.nextafter(config.warmup_epochs, 0),
        config.warmup_epochs,
        config.warmup_epochs + ramp,
    )
    return sorted(
        {*map(float, range(math.ceil(config.epochs))), *(e for e in ends if e < config.epochs)}
    )


def peak_learning_rate(config: RunConfig) -> float:
    """The largest learning rate of a run, scaled for the number of GPUs and the batch of each
    epoch.
    """
    values = schedule(config)
    stages = batches(config)
    batch = {
        epoch: stages.at(int(epoch)).global_batch(config.gpus) for epoch in peak_epochs(config)
    }
    return max(values(epoch, epoch, batch[epoch])["learning_rate"] for epoch in batch)


def schedule(config: RunConfig) -> training_schedule.Schedule:
    """Learning rate, momentum and bounds by fractional epoch, from flags of the same name and what
    is worked out.

    For --optimizer=adabound the scheduled rate is Adam's own; the rate of SGD, to which the bounds
    close, follows it.
    """
    method, values = OPTIMIZERS[config.optimizer], config.values()
    flags = {name: values[name] for name in training_schedule.CREATE_FLAGS if name in values}
    worked_out: dict[str, Any] = {
        "epochs": schedule_end(config),
        "workers": config.gpus,
        "base_batch": base_batch(config),
        "bounded_warmup": method.bounded_warmup,
    }
    if method.rate != "lr":
        worked_out |= {"lr": rates(config)[method.rate], "lr_scaling": "none"}
    return training_schedule.create(
        **flags | options_for("lr_schedule", config.lr_schedule, config.chosen) | worked_out
    )


def optimizer_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments of `optimizers.create`: the chosen options by the names that the constructor has
    for them.
    """
    method, peaks = OPTIMIZERS[config.optimizer], rates(config)
    arguments = {
        known.name: config.chosen[flag] for flag, known in options_of(method.options).items()
    }
    rate = (
        peak_learning_rate(config)
        if config.lr_schedule in training_schedule.FIXED_SCHEDULES
        else peaks[method.rate]
    )
    worked_out = peaks | {"learning_rate": rate, "final_lr": peaks["lr"]}
    if config.chosen.get("decoupled_decay"):
        worked_out["weight_decay"] = decoupled_decay(config)
    names = {field.name for field in dataclasses.fields(method.options)}
    arguments |= {name: value for name, value in worked_out.items() if name in names}
    return {"optimizer": config.optimizer, **arguments}


def decoupled_decay(config: RunConfig) -> float:
    """The part of the weights that --decoupled_decay takes off in a step at the peak of the
    learning rate.

    --weight_decay is that for 256 images. It grows with the batch, so that an epoch decays alike at
    every batch.
    """
    return float(config.chosen["weight_decay"]) * base_batch(config) / REFERENCE_BATCH


def communication(config: RunConfig) -> CommunicationSettings:
    """Returns the settings by which ranks communicate.

    Raises:
      UserError: if groups for normalization do not hold all GPUs.
    """
    values = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(CommunicationFlags)
    }
    check_groups(config)
    _, together = normalized_together(config)
    return CommunicationSettings(
        **values,
        options=options_for("allreduce", config.allreduce, config.chosen),
        neighbors=together if together < config.ranks else 1,
        deterministic=config.deterministic,
    )


def title(config: RunConfig) -> str:
    """Returns what is trained, on how many ranks and with which batch: the title of a run."""
    virtual = f" x {config.virtual_gpus} virtual GPUs" if config.virtual_gpus > 1 else ""
    ranks = pluralize(config.ranks, "rank")
    return f"{config.model} on {config.dataset}, {ranks}{virtual} x {config.per_gpu_batch} images"
