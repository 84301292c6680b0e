"""Derives settings by batch, and arguments of optimizer and schedule, from a configuration and a number of workers."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.comm.settings import Communication, Settings
from hybrid_imagenet.config import choices, signatures
from hybrid_imagenet.data import registry
from hybrid_imagenet.errors import SharedError, UserError
from hybrid_imagenet.numerics import batch_schedule, image_sizes, mlperf, schedules, tuning_split
from hybrid_imagenet.numerics.batch_schedule import BatchSchedule
from hybrid_imagenet.numerics.relative_step import relative_step
from hybrid_imagenet.numerics.schedules import REFERENCE_BATCH, adam_rate, peak_rate
from hybrid_imagenet.optimizers.registry import OPTIMIZERS

if TYPE_CHECKING:
    from hybrid_imagenet.config import Config


def batches(config: Config) -> BatchSchedule:
    """The batch by epoch.

    Raises:
      ValueError: for a --batch_schedule that cannot be read.
    """
    return batch_schedule.parse(
        config.batch_schedule,
        config.per_gpu_batch,
        config.gradient_accumulation_steps,
        config.batch_growth,
        config.epochs,
    )


def sizes(config: Config) -> image_sizes.ImageSizes:
    """The size of training images by epoch.

    Raises:
      ValueError: for an --image_size_schedule that cannot be read.
    """
    return image_sizes.parse(config.image_size_schedule, config.image_size)


def evaluation_size(config: Config) -> int:
    """The side of validation images, in pixels."""
    return config.eval_image_size or config.image_size


def workers(config: Config, ranks: int) -> int:
    """N, the GPUs that learning rates and batches go by: those that all ranks stand for (--virtual_gpus)."""
    return ranks * config.virtual_gpus


def normalized_together(config: Config, ranks: int) -> tuple[int, int]:
    """Whose images share the statistics of batch normalization (--sync_batch_norm, --bn_group).

    Returns:
      The equal parts of a rank's batch that are normalized each by itself, and the number of neighbouring ranks whose
      batches are normalized together; one of the two is 1.
    """
    if config.sync_batch_norm:
        return 1, ranks
    if config.bn_group <= config.virtual_gpus:
        return config.virtual_gpus // config.bn_group, 1
    return 1, config.bn_group // config.virtual_gpus


def check_groups(config: Config, gpus: int) -> None:
    """Checks the groups that normalize together (--bn_group, --sync_batch_norm) against the number of GPUs.

    Raises:
      SharedError: as all ranks find the same, if groups do not hold all GPUs, or XLA would have to compile sums over
        ranks: it knows neither Horovod's nor TensorFlow's on a CPU.
    """
    if gpus % config.bn_group:
        raise SharedError(
            f"--bn_group={config.bn_group}: {gpus} GPUs do not make whole groups; give a divisor of {gpus}"
        )
    if config.jit_compile and normalized_together(config, gpus // config.virtual_gpus)[1] > 1:
        flag = "sync_batch_norm" if config.sync_batch_norm else f"bn_group={config.bn_group}"
        raise SharedError(
            f"--{flag} sums statistics over ranks in the pass that --jit_compile compiles, which XLA cannot: omit one"
        )


def held_out(config: Config, num_examples: int) -> int:
    """Returns the number of training images that --tuning_split keeps apart.

    Raises:
      UserError: if nothing would be left to train on, or to tune on.
    """
    try:
        return tuning_split.held_out(config.tuning_split, num_examples)
    except ValueError as error:
        raise UserError(f"--tuning_split={config.tuning_split:g}: {error}") from None


def base_batch(config: Config, workers: int) -> int:
    """Images per update of all workers at the start of the run."""
    return batches(config).at(0).global_batch(workers)


TABLE = "MLPerf's table"
"""How the origin of a setting begins that follows from the batch."""


def settle(config: Config, workers: int) -> Config:
    """The configuration with the settings that follow from the batch at the start of the run, and from a URL.

    With --lr_schedule=mlperf these are the learning rate (which is then not scaled), warmup, momentum, weight decay
    and number of epochs of MLPerf's table (`numerics.mlperf`), the offset by which a validation falls on the epoch in
    which the target is expected, and the group of GPUs that normalizes about as many images as the table has; with
    --optimizer=hybrid the trust coefficient, which gives LARS the relative step of that table as soon as it has come
    in. A recipe, a flag file or the command line goes before them; `origins` tells what set them. Any other
    configuration comes back as it is, and so does one whose --per_gpu_batch is still to be found. A settled one can be
    settled again for another number of workers.

    Files at a URL are copied while they are read: there --shuffle_window is that of `data.registry`, unless it is set.

    Args:
      config: complete.
      workers: number of GPUs.
    """
    window = registry.of(config.dataset).url_window
    if config.shuffle_window is None and "://" in (config.data_dir or "") and window:
        config = config.replace({"shuffle_window": "a URL"}, shuffle_window=window)
    if config.lr_schedule == "mlperf":
        config = _from_table(config, workers)
    if OPTIMIZERS[config.optimizer].bounded_warmup and _is_free(config.origins.get("lars_eta", "")):
        config = _tuned_lars(config, workers)
    return config


def _tuned_lars(config: Config, workers: int) -> Config:
    """Sets --lars_eta so that LARS has the tuned relative step in its first step after the warmup and the ramp."""
    variant = config.chosen["lars_variant"]
    if variant == "none":
        return config
    batch = base_batch(config, workers)
    begins = config.warmup_epochs + config.chosen["hybrid_ramp_epochs"]
    first = schedules.create(**_schedule_arguments(config, workers))(begins, begins, batch)
    rate, momentum = first["learning_rate"], first["momentum"]
    of_one = relative_step(1.0 if variant == "larc" else rate, 1.0, momentum, gradient_factor(config, momentum))
    if of_one <= 0:
        return config
    wanted = mlperf.tuned_step(batch)
    origin = f"{TABLE} at batch {batch}: relative step {wanted:.3g}"
    return config.replace({"lars_eta": origin}, lars_eta=wanted / of_one)


def gradient_factor(config: Config, momentum: float) -> float:
    """The factor in front of the gradient in LARS's velocity: 1 - momentum where hybrid goes on averaging, else 1."""
    return 1 - momentum if config.chosen.get("hybrid_handover") == "continuous" else 1.0


def _from_table(config: Config, workers: int) -> Config:
    batch = base_batch(config, workers)
    point = mlperf.at(batch)
    table: dict[str, Any] = {
        "lr": point.lr,
        "lr_scaling": "none",
        "warmup_epochs": point.warmup_epochs,
        "warmup_start_lr": 0.0,
        "momentum": point.momentum,
        "weight_decay": point.weight_decay,
        "epochs": round(point.schedule_epochs),
        "eval_offset_epochs": point.evaluation_offset(config.eval_every_epochs),
    }
    if not config.sync_batch_norm and ":" not in config.model:
        table["bn_group"] = _table_group(config, workers, point.normalized_images)
    free = {name: value for name, value in table.items() if _is_free(config.origins.get(name, ""))}
    return config.replace(dict.fromkeys(free, f"{TABLE} at batch {batch}"), **free)


def _table_group(config: Config, workers: int, images: int) -> int:
    """--bn_group for so many images, among the groups that these GPUs, --virtual_gpus and --jit_compile allow."""
    virtual = config.virtual_gpus
    groups = [g for g in range(1, workers + 1) if workers % g == 0 and (virtual % g == 0 or g % virtual == 0)]
    return mlperf.normalization_group(
        images, config.per_gpu_batch, [g for g in groups if g <= virtual or not config.jit_compile]
    )


def _is_free(origin: str) -> bool:
    return origin == "default" or origin.startswith(TABLE)


def schedule_end(config: Config, workers: int) -> float:
    """The epoch at which a schedule that decays to 0 does so: --epochs, or the end in MLPerf's table that it rounds."""
    if config.lr_schedule == "mlperf":
        end = mlperf.at(base_batch(config, workers)).schedule_epochs
        if config.epochs == round(end):
            return end
    return float(config.epochs)


def rates(config: Config, workers: int) -> dict[str, float]:
    """Returns the peak of each learning rate by its flag: lr after linear scaling, and Adam's rate in AdaBound."""
    found = {"lr": peak_rate(config.lr, config.lr_scaling, workers, base_batch(config, workers))}
    if "adabound_lr" in config.chosen:
        scaling = config.chosen["adabound_lr_scaling"]
        found["adabound_lr"] = adam_rate(config.chosen["adabound_lr"], workers, adabound_lr_scaling=scaling)
    return found


def peak_epochs(config: Config) -> list[float]:
    """Fractional epochs among which a schedule has its peak: starts of epochs, and both sides of the warmup's end."""
    ramp = config.chosen.get("hybrid_ramp_epochs", 0.0)
    ends = (math.nextafter(config.warmup_epochs, 0), config.warmup_epochs, config.warmup_epochs + ramp)
    return sorted({*map(float, range(math.ceil(config.epochs))), *(e for e in ends if e < config.epochs)})


def peak_learning_rate(config: Config, workers: int) -> float:
    """The largest learning rate of a run, scaled for the number of GPUs and the batch of each epoch."""
    schedule, stages = schedules.create(**schedule_arguments(config, workers)), batches(config)
    batch = {epoch: stages.at(int(epoch)).global_batch(workers) for epoch in peak_epochs(config)}
    return max(schedule(epoch, epoch, batch[epoch])["learning_rate"] for epoch in batch)


def schedule_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `numerics.schedules.create`: flags of the same name, and what is worked out.

    For --optimizer=adabound the scheduled rate is Adam's own; the rate of SGD, to which the bounds close, follows it.
    """
    return _schedule_arguments(settle(config, workers), workers)


def _schedule_arguments(config: Config, workers: int) -> dict[str, Any]:
    """The same for a configuration that is settled but for LARS."""
    method, values = OPTIMIZERS[config.optimizer], config.values()
    flags = {name: values[name] for name in inspect.signature(schedules.create).parameters if name in values}
    worked_out: dict[str, Any] = {
        "epochs": schedule_end(config, workers),
        "workers": workers,
        "base_batch": base_batch(config, workers),
        "bounded_warmup": method.bounded_warmup,
    }
    if method.rate != "lr":
        worked_out |= {"lr": rates(config, workers)[method.rate], "lr_scaling": "none"}
    return flags | choices.options_for("lr_schedule", config.lr_schedule, config.chosen) | worked_out


def optimizer_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `optimizers.create`: the chosen options by the names that the constructor has for them."""
    config = settle(config, workers)
    method, peaks = OPTIMIZERS[config.optimizer], rates(config, workers)
    options = choices.optimizer_options(config.optimizer)
    known = {argument.name: config.chosen[flag] for flag, argument in options.items()}
    known |= peaks | {"learning_rate": peaks[method.rate], "final_lr": peaks["lr"]}
    if config.chosen.get("decoupled_decay"):
        known["weight_decay"] = decoupled_decay(config, workers)
    arguments = {name: known[name] for name in signatures.read(method.constructor) if name in known}
    return {"optimizer": config.optimizer, **arguments}


def decoupled_decay(config: Config, workers: int) -> float:
    """The part of the weights that --decoupled_decay takes off in a step at the peak of the learning rate.

    --weight_decay is that for 256 images. It grows with the batch, so that an epoch decays alike at every batch.
    """
    return float(config.chosen["weight_decay"]) * base_batch(config, workers) / REFERENCE_BATCH


def communication(config: Config, ranks: int = 1) -> Settings:
    """Returns the settings by which ranks communicate.

    Raises:
      UserError: if groups for normalization do not hold all GPUs.
    """
    config = settle(config, workers(config, ranks))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(Communication)}
    check_groups(config, workers(config, ranks))
    _, together = normalized_together(config, ranks)
    return Settings(
        **values,
        options=choices.options_for("allreduce", config.allreduce, config.chosen),
        neighbors=together if together < ranks else 1,
        deterministic=config.deterministic,
    )
