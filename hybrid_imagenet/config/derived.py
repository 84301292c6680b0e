"""What a configuration comes to with a number of workers: settings by batch, arguments of optimizer and schedule."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.config import choices
from hybrid_imagenet.config.options import AUTO
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import batch_schedule, image_sizes, mlperf, tuning_split
from hybrid_imagenet.numerics.batch_schedule import BatchSchedule
from hybrid_imagenet.numerics.schedules import peak_rate

if TYPE_CHECKING:
    from hybrid_imagenet.config import Config


def batches(config: Config) -> BatchSchedule:
    """The batch by epoch.

    Raises:
      ValueError: for a --batch_schedule that cannot be read.
      UserError: for --per_gpu_batch=auto, as long as no number has been found.
    """
    if config.per_gpu_batch == AUTO:
        raise UserError("--per_gpu_batch=auto: the batch is found when training starts; give a number here")
    return batch_schedule.parse(
        config.batch_schedule, config.per_gpu_batch, config.accumulation, config.batch_growth, config.epochs
    )


def sizes(config: Config) -> image_sizes.ImageSizes:
    """The size of training images by epoch.

    Raises:
      ValueError: for an --image_size_schedule that cannot be read.
    """
    return image_sizes.parse(config.image_size_schedule, config.image_size)


def held_out(config: Config, num_examples: int) -> int:
    """How many of the training images --tuning_split keeps apart.

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


_TABLE = "MLPerf's table"


def settle(config: Config, workers: int) -> Config:
    """The configuration with the settings that follow from the batch at the start of the run.

    With --lr_schedule=mlperf these are the learning rate (which is then not scaled), warmup, momentum, weight decay
    and number of epochs of MLPerf's table (`numerics.mlperf`), unless a recipe, a flag file or the command line sets
    them; `origins` tells so. Any other configuration comes back as it is, and so does one whose --per_gpu_batch is
    still to be found. A settled one can be settled again for another number of workers.

    Args:
      config: complete.
      workers: number of GPUs.
    """
    if config.lr_schedule != "mlperf" or config.per_gpu_batch == AUTO:
        return config
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
    }
    free = {name: value for name, value in table.items() if _is_free(config.origins.get(name, ""))}
    return config.replace(dict.fromkeys(free, f"{_TABLE} at batch {batch}"), **free)


def _is_free(origin: str) -> bool:
    return origin == "default" or origin.startswith(_TABLE)


def schedule_end(config: Config, workers: int) -> float:
    """The epoch at which a schedule that decays to 0 does so: --epochs, or the end in MLPerf's table that it rounds."""
    if config.lr_schedule == "mlperf":
        end = mlperf.at(base_batch(config, workers)).schedule_epochs
        if config.epochs == round(end):
            return end
    return float(config.epochs)


def schedule_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `numerics.schedules.create`.

    For --optimizer=adabound the scheduled rate is Adam's own; that of SGD, to which the bounds close, follows it.
    """
    config = settle(config, workers)
    adabound = config.optimizer == "adabound"
    return {
        "schedule": config.lr_schedule,
        "lr": adam_rate(config, workers) if adabound else config.lr,
        "epochs": schedule_end(config, workers),
        "workers": workers,
        "base_batch": base_batch(config, workers),
        "scaling": "none" if adabound else config.lr_scaling,
        "warmup_epochs": config.warmup_epochs,
        "bounded_warmup": config.optimizer == "hybrid",
        "warmup_start_lr": config.warmup_start_lr,
        "kappa": config.lr_decay,
        "exponent": config.lr_decay_exponent,
        "milestones": config.lr_steps,
        "factor": config.lr_step_factor,
        "power": config.lr_power,
        "final_lr": config.lr_final,
        "momentum": config.momentum,
        "momentum_rule": config.momentum_rule,
        "bound_time": config.bound_time,
        "beta2": config.adabound_beta2,
    }


def adam_rate(config: Config, workers: int) -> float:
    """alpha, the learning rate of Adam inside AdaBound."""
    return config.adabound_lr * (workers if config.adabound_lr_scaling else 1)


def optimizer_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `optimizers.create`."""
    config = settle(config, workers)
    peak = peak_rate(config.lr, config.lr_scaling, workers, base_batch(config, workers))
    alpha = adam_rate(config, workers)
    arguments: dict[str, Any] = {
        "optimizer": config.optimizer,
        "learning_rate": alpha if config.optimizer == "adabound" else peak,
        "weight_decay": config.weight_decay,
        "decay_all": config.decay_all,
    }
    if config.optimizer != "adabound":
        arguments |= {"momentum": config.momentum}
    if config.optimizer in ("sgd", "lars"):
        arguments |= {"nesterov": config.nesterov}
    if config.optimizer in ("hybrid", "adabound"):
        arguments |= {"beta1": config.adabound_beta1, "beta2": config.adabound_beta2, "eps": config.adabound_eps}
    if config.optimizer == "adabound":
        arguments |= {"final_lr": peak, "gamma": config.adabound_gamma, "amsbound": config.amsbound}
    if config.optimizer == "lars":
        arguments |= {"variant": config.lars, "eta": config.lars_eta}
        arguments |= {"eps": config.lars_eps, "eps_rule": config.lars_eps_rule}
    if config.optimizer == "hybrid":
        arguments |= {"lars": config.lars, "eta": config.lars_eta}
        arguments |= {"lars_eps": config.lars_eps, "lars_eps_rule": config.lars_eps_rule}
        arguments |= {"alpha": alpha, "bias_correction": config.bias_correction}
        arguments |= {"handover": config.handover, "decay_in_warmup": config.decay_in_warmup}
    return arguments


def communication(config: Config) -> Settings:
    """How gradients travel."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(Settings) if f.name != "options"}
    return Settings(**values, options=choices.options_for("allreduce", config.allreduce, config.chosen))
