"""Plain arguments for the optimizer and its schedule, from a configuration and the number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_imagenet.config.options import AUTO
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import batch_schedule, image_sizes
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


def base_batch(config: Config, workers: int) -> int:
    """Images per update of all workers at the start of the run."""
    return batches(config).at(0).global_batch(workers)


def schedule_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `numerics.schedules.create`.

    For --optimizer=adabound the scheduled rate is Adam's own; that of SGD, to which the bounds close, follows it.
    """
    adabound = config.optimizer == "adabound"
    return {
        "schedule": config.lr_schedule,
        "lr": adam_rate(config, workers) if adabound else config.lr,
        "epochs": float(config.epochs),
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
